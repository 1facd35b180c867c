"""The loop of a rank: messages in, messages out, over one channel."""

import argparse
import logging
import os
import select
import socket
import threading
import traceback

import torch

from plait.worker import protocol
from plait.worker.channel import Channel, ChannelClosed
from plait.worker.collectives import TensorParallel
from plait.worker.rank import Rank

logger = logging.getLogger(__name__)


def serve(rank: Rank, channel: Channel) -> None:
    """Answer messages until the controller says so or is gone.

    An error while handling a message is sent back as a `Failure` and ends the rank: the ranks of
    a model must not go on with one of them out of step. Errors of `Load` are answered and the
    rank lives on, so that a pool of ranks can try another model.
    """
    while True:
        try:
            request = protocol.decode_request(channel.receive())
        except ChannelClosed:
            return
        try:
            match request:
                case protocol.Load():
                    reply: protocol.Message = rank.load(request)
                case protocol.Allocate():
                    reply = rank.allocate(request)
                case protocol.StepInput():
                    reply = rank.step(request)
                case protocol.Shutdown():
                    return
        except Exception as exc:
            logger.exception("rank failed on %s", type(request).__name__)
            failure = protocol.Failure(
                kind=type(exc).__name__, message=str(exc), traceback=traceback.format_exc()
            )
            channel.send(protocol.encode(failure))
            if not isinstance(request, protocol.Load):
                raise
            continue
        channel.send(protocol.encode(reply))


def main() -> None:
    """Entry point of `python -m plait.worker.rank_process`, started by the process executor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True, help="connected socket to the controller")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    options = parser.parse_args()
    sock = socket.socket(fileno=options.fd)
    _die_with_controller(sock)
    channel = Channel(sock, peer="the controller")
    run(
        channel,
        rank=options.rank,
        size=options.size,
        device=options.device,
        rendezvous=options.rendezvous,
        timeout_s=options.timeout_s,
    )


def run(
    channel: Channel, *, rank: int, size: int, device: str, rendezvous: str, timeout_s: float
) -> None:
    """Join the ranks at `rendezvous` and answer messages until the channel closes."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    # Ray shows a rank one device; the process executor names one by its index.
    target = torch.device("cuda:0" if device == "cuda" else device)
    if target.type == "cuda":
        torch.cuda.set_device(target)
    group = TensorParallel.connect(
        rank=rank, size=size, device=target, rendezvous=rendezvous, timeout_s=timeout_s
    )
    try:
        serve(Rank(group, device=target), channel)
    finally:
        group.close()
        channel.close()


def _die_with_controller(sock: socket.socket) -> None:
    """End this process as soon as the controller is gone, wherever this rank is stuck.

    The kernel closes the other end of `sock` however the controller ends. Its parent-death signal
    would also come when only the thread that started this rank ends.
    """
    poller = select.poll()
    poller.register(sock, 0)  # nothing but that the other end is closed

    def wait() -> None:
        poller.poll()
        os._exit(1)

    threading.Thread(target=wait, name="controller-watch", daemon=True).start()


if __name__ == "__main__":
    main()
