"""The interface that engine and controller have to the ranks, and what channels share."""

import selectors
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NoReturn, TypeVar

from plait.worker import errors, protocol
from plait.worker.channel import Channel, ChannelClosed
from plait.worker.errors import PlaitError, RankError


class Executor(ABC):
    """The ranks of one model copy. Steps are answered in the order in which they were submitted."""

    tensor_parallel_size: int

    @abstractmethod
    def load(self, request: protocol.Load) -> list[protocol.Loaded]:
        """Load the model on every rank; one reply per rank.

        Raises:
            PlaitError: the first rank's error, with its own type where that is known here.
        """

    @abstractmethod
    def allocate(self, request: protocol.Allocate) -> list[protocol.Ready]:
        """Allocate the arena on every rank."""

    @abstractmethod
    def submit(self, step: protocol.StepInput) -> None:
        """Send a step to every rank without waiting for the answer."""

    @abstractmethod
    def collect(self) -> protocol.StepOutput:
        """The output of the oldest submitted step.

        Raises:
            RankError: a rank failed, hangs, or drew other tokens than rank 0.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End every rank and leave nothing behind. May be called more than once."""


class ChannelExecutor(Executor):
    """Ranks behind channels; a subclass starts them and can kill them.

    The first failure of any rank ends all of them, since the others may wait for it in a
    collective for ever.
    """

    def __init__(
        self, channels: Sequence[Channel], *, load_timeout_s: float, step_timeout_s: float
    ) -> None:
        self.tensor_parallel_size = len(channels)
        self._channels = list(channels)
        self._load_timeout_s = load_timeout_s
        self._step_timeout_s = step_timeout_s

    @abstractmethod
    def kill(self) -> None:
        """End the rank processes at once, without asking."""

    def describe_exit(self, rank: int) -> str:
        """What is known about how a rank that closed its channel ended, to be added to an error."""
        return ""

    def load(self, request: protocol.Load) -> list[protocol.Loaded]:
        replies = self._ask(protocol.encode(request), self._load_timeout_s)
        return [_expect(reply, protocol.Loaded) for reply in replies]

    def allocate(self, request: protocol.Allocate) -> list[protocol.Ready]:
        replies = self._ask(protocol.encode(request), self._load_timeout_s)
        return [_expect(reply, protocol.Ready) for reply in replies]

    def submit(self, step: protocol.StepInput) -> None:
        self._send(protocol.encode(step), self._step_timeout_s)

    def collect(self) -> protocol.StepOutput:
        outputs = [
            _expect(reply, protocol.StepOutput) for reply in self._gather(self._step_timeout_s)
        ]
        first = outputs[0]
        for rank, output in enumerate(outputs):
            if (output.step, output.token_digest) != (first.step, first.token_digest):
                self.kill()
                raise RankError(
                    f"rank {rank} drew other tokens than rank 0 in step {first.step}; "
                    "the ranks were ended"
                )
        return first

    def shutdown(self) -> None:
        for channel in self._channels:
            try:
                channel.send(protocol.encode(protocol.Shutdown()), timeout_s=1.0)
            except RankError:
                continue
            finally:
                channel.close()
        self._channels = []
        self.kill()

    def _ask(self, data: bytes, timeout_s: float) -> list[protocol.Reply]:
        self._send(data, timeout_s)
        return self._gather(timeout_s)

    def _send(self, data: bytes, timeout_s: float) -> None:
        for rank, channel in enumerate(self._channels):
            try:
                channel.send(data, timeout_s=timeout_s)
            except RankError as exc:
                self._fail(rank, exc)

    def _gather(self, timeout_s: float) -> list[protocol.Reply]:
        """One reply of every rank; the first failure seen is the one reported."""
        replies: dict[int, protocol.Reply] = {}
        failures: list[tuple[int, protocol.Failure]] = []
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                selector.register(channel, selectors.EVENT_READ, (rank, channel))
            while len(replies) < len(self._channels):
                left = deadline - time.monotonic()
                events = selector.select(max(0.0, left))
                if not events:
                    silent = sorted(set(range(len(self._channels))) - replies.keys())
                    message = f"rank {silent[0]} did not answer within {timeout_s:g} s"
                    self._fail(silent[0], RankError(message))
                for key, _ in events:
                    rank, channel = key.data
                    reply = self._receive(rank, channel, max(left, 1.0), failures)
                    selector.unregister(channel)
                    replies[rank] = reply
                    if isinstance(reply, protocol.Failure):
                        failures.append((rank, reply))
                if failures:
                    # Ranks that failed alike answer soon; one that waits for them never does.
                    deadline = min(deadline, time.monotonic() + 1.0)
                    if not selector.get_map() or not selector.select(1.0):
                        break
        if failures:
            self._raise(*failures[0], all_answered=len(replies) == len(self._channels))
        return [replies[rank] for rank in range(len(self._channels))]

    def _receive(
        self,
        rank: int,
        channel: Channel,
        timeout_s: float,
        failures: list[tuple[int, protocol.Failure]],
    ) -> protocol.Reply:
        try:
            return protocol.decode_reply(channel.receive(timeout_s=timeout_s))
        except ChannelClosed as exc:
            self._fail(rank, exc)  # what others failed with is only that they missed this rank
        except RankError as exc:
            if failures:
                self._raise(*failures[0], all_answered=False)
            self._fail(rank, exc)

    def _fail(self, rank: int, exc: Exception) -> NoReturn:
        end = self.describe_exit(rank) if isinstance(exc, ChannelClosed) else ""
        self.kill()
        raise RankError(f"{exc}{end}") from exc

    def _raise(self, rank: int, failure: protocol.Failure, *, all_answered: bool) -> NoReturn:
        """Raise a rank's error as its own type; ranks that are out of step are ended."""
        known = getattr(errors, failure.kind, None)
        if not (isinstance(known, type) and issubclass(known, PlaitError)):
            known = None
        if known is None or not all_answered:
            self.kill()
        if known is not None:
            raise known(failure.message)
        raise RankError(
            f"rank {rank} failed with {failure.kind}: {failure.message}\n{failure.traceback}"
        )


_Reply = TypeVar("_Reply", protocol.Loaded, protocol.Ready, protocol.StepOutput)


def _expect(reply: protocol.Reply, kind: type[_Reply]) -> _Reply:
    if not isinstance(reply, kind):
        raise RankError(f"a rank answered {type(reply).__name__} where {kind.__name__} was due")
    return reply
