"""Ranks as Ray actors in the placement group of their replica."""

import contextlib
import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from plait.cluster.executors.base import ChannelExecutor
from plait.cluster.executors.process import default_threads, rank_environment
from plait.worker import protocol
from plait.worker.channel import Channel
from plait.worker.errors import RankError

logger = logging.getLogger(__name__)

# A rank that shares a node with others must not keep the placement group from being placed.
RANK_CPUS = 0.1


class RankActor:
    """One rank. `run` is its step loop and only returns when the rank has ended."""

    def place(self) -> tuple[str, int]:
        """The node that this rank runs on, and its process there."""
        return str(ray.get_runtime_context().get_node_id()), os.getpid()

    def run(self, *, address: str, secret: str, rank: int, options: dict[str, Any]) -> None:
        """Dial the controller at `address` and answer it until the channel closes."""
        from plait.worker import rank_process

        channel = Channel(_dial(address), peer="the controller")
        channel.send(f"{rank}:{secret}".encode())
        rank_process.run(channel, rank=rank, **options)


class RayExecutor(ChannelExecutor):
    """`size` ranks in bundles 0..size-1 of `group`; this process sits in bundle 0."""

    def __init__(
        self,
        group: PlacementGroup,
        *,
        size: int,
        device: str,
        threads_per_rank: int | None = None,
        load_timeout_s: float = 1800.0,
        step_timeout_s: float = 60.0,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="plait-")
        environment = rank_environment(threads_per_rank or default_threads(size))
        self._actors = [
            ray.remote(RankActor)
            .options(
                num_cpus=RANK_CPUS,
                num_gpus=1 if device == "cuda" else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                ),
                runtime_env={"env_vars": environment},
            )
            .remote()
            for rank in range(size)
        ]
        places = ray.get([actor.place.remote() for actor in self._actors], timeout=load_timeout_s)
        here = ray.get_runtime_context().get_node_id()
        self._local_pids = [pid for node, pid in places if node == here]
        is_local = len(self._local_pids) == size
        host = ray.util.get_node_ip_address()
        listener, address = _listen(Path(self._folder.name), host, is_local=is_local)
        rendezvous = (
            f"file://{Path(self._folder.name) / 'rendezvous'}"
            if is_local
            else f"tcp://{host}:{_free_port(host)}"
        )
        options = {
            "size": size,
            "device": device,
            "rendezvous": rendezvous,
            "timeout_s": load_timeout_s,
        }
        secret = secrets.token_urlsafe(32)
        self.runs = [
            actor.run.remote(address=address, secret=secret, rank=rank, options=options)
            for rank, actor in enumerate(self._actors)
        ]
        with listener:
            channels = _accept(listener, size=size, secret=secret, timeout_s=load_timeout_s)
        super().__init__(channels, load_timeout_s=load_timeout_s, step_timeout_s=step_timeout_s)

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` once, from a thread, as soon as the loop of any rank has ended."""

        def wait() -> None:
            done, _ = ray.wait(self.runs, num_returns=1)
            try:
                ray.get(done)
                reason = "ended"
            except ray.exceptions.RayError as exc:
                reason = f"died: {type(exc).__name__}"
            on_death(f"rank {self.runs.index(done[0])} {reason}")

        threading.Thread(target=wait, name="rank-watcher", daemon=True).start()

    def allocate(self, request: protocol.Allocate) -> list[protocol.Ready]:
        replies = super().allocate(request)
        self._folder.cleanup()  # every rank is connected: a crash must not leave sockets behind
        return replies

    def kill(self) -> None:
        """End the ranks; Ray asks them to, which one that is stopped would never hear."""
        for actor in self._actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor, no_restart=True)
        for pid in self._local_pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._local_pids = []

    def shutdown(self) -> None:
        super().shutdown()
        self._folder.cleanup()


def _listen(folder: Path, host: str, *, is_local: bool) -> tuple[socket.socket, str]:
    """A listening socket for the ranks, and its address: a path, or host:port across nodes."""
    if is_local:
        path = str(folder / "ranks.sock")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        return listener, path
    listener = socket.create_server((host, 0))
    return listener, f"{host}:{listener.getsockname()[1]}"


def _dial(address: str) -> socket.socket:
    if os.path.isabs(address):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
        return sock
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def _accept(listener: socket.socket, *, size: int, secret: str, timeout_s: float) -> list[Channel]:
    """The channel of every rank, in rank order; connections without the secret are dropped."""
    channels: dict[int, Channel] = {}
    listener.settimeout(timeout_s)
    while len(channels) < size:
        try:
            sock, _ = listener.accept()
        except TimeoutError as exc:
            missing = sorted(set(range(size)) - channels.keys())
            raise RankError(f"ranks {missing} did not connect within {timeout_s:g} s") from exc
        channel = Channel(sock, peer="a rank")
        number, _, given = channel.receive(timeout_s=10.0).decode(errors="replace").partition(":")
        if not secrets.compare_digest(given.encode(), secret.encode()):
            logger.warning("a connection for a rank came without the secret")
            channel.close()
            continue
        channel.peer = f"rank {number}"
        channels[int(number)] = channel
    return [channels[rank] for rank in range(size)]


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as sock:
        return int(sock.getsockname()[1])
