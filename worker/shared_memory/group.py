"""A shared-memory segment that the ranks of one host sum and gather through.

The segment is an anonymous file (memfd) of rank 0 that the others open through /proc while it is
being set up: it never has a name, so nothing is left behind however ranks end, and the size of
/dev/shm does not matter.
"""

import logging
import mmap
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from plait.kernels.native import NativeBuildError, NativeLibrary, dtype_code, unavailable
from plait.worker.errors import RankError

library = NativeLibrary(
    Path(__file__).with_name("native.c"),
    counting=("all_reduce", "all_gather", "is_missing"),
    all_reduce="piiipiiiiii",
    all_gather="piiipiipiii",
    is_missing="piii",
)

DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
MAX_RANKS: Final = 32  # as in native.c

_HEADER_BYTES: Final = 4096
_TOKEN_AT: Final = _HEADER_BYTES - 16
_CAPACITY: Final = 2 << 20
# From this size on every rank sums a part instead of everything.
_PARTS_FROM_BYTES: Final = 128 << 10
# How long C code waits before it lets this side look after the other ranks.
_PATIENCE_US: Final = 100_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """A process, told from a later one with the same id by when it was started."""

    pid: int
    start_ticks: int  # since boot: setting the clock does not change it

    @classmethod
    def here(cls) -> "Peer":
        return cls(os.getpid(), _stat(os.getpid())[1])

    def is_alive(self) -> bool:
        try:
            state, start_ticks = _stat(self.pid)
        except OSError:
            return False
        return start_ticks == self.start_ticks and state not in "ZX"


class SharedMemoryGroup:
    """The collectives of one rank over a mapped segment.

    Every rank must make the same calls in the same order. Sums are taken in rank order in float32
    and rounded once: all ranks get the same bits.
    """

    def __init__(
        self, segment: mmap.mmap, *, rank: int, peers: list[Peer], timeout_s: float
    ) -> None:
        self._memory = torch.frombuffer(segment, dtype=torch.uint8)
        self._base = self._memory.data_ptr()
        self._rank = rank
        self._peers = peers  # by rank, this one included
        self._timeout_s = timeout_s
        self._operation = 0

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum `x` over ranks in place; contiguous, one of `DTYPES`.

        Raises:
            RankError: another rank is gone, or did not come within the time limit.
        """
        code, count, address = dtype_code(x.dtype), x.numel(), x.data_ptr()
        most = _CAPACITY // x.element_size()
        for start in range(0, count, most):
            self._reduce(address + start * x.element_size(), code, min(most, count - start))

    def _reduce(self, address: int, code: int, count: int) -> None:
        self._operation += 1
        in_parts = len(self._peers) > 2 and count * 2 >= _PARTS_FROM_BYTES
        stage, deadline = 0, 0.0
        while stage := library.load().all_reduce(
            self._base,
            self._rank,
            len(self._peers),
            _CAPACITY,
            address,
            code,
            count,
            self._operation,
            in_parts,
            stage,
            _PATIENCE_US,
        ):
            deadline = self._check_peers(stage, deadline)

    def can_gather(self, x: torch.Tensor) -> bool:
        """Whether a row of `x` fits into the segment."""
        return x.shape[-1] * x.element_size() <= _CAPACITY

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """(R, D) of every rank side by side, (R, size * D), in rank order; `x` contiguous.

        Raises:
            RankError: another rank is gone, or did not come within the time limit.
        """
        rows, width = x.shape
        out = torch.empty((rows, len(self._peers) * width), dtype=x.dtype)
        most = max(1, _CAPACITY // max(1, width * x.element_size()))
        for start in range(0, rows, most):
            part = slice(start, start + most)
            self._gather(x[part], out[part])
        return out

    def _gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._operation += 1
        stage, deadline = 0, 0.0
        while stage := library.load().all_gather(
            self._base,
            self._rank,
            len(self._peers),
            _CAPACITY,
            x.data_ptr(),
            len(x),
            x.shape[1] * x.element_size(),
            out.data_ptr(),
            self._operation,
            stage,
            _PATIENCE_US,
        ):
            deadline = self._check_peers(stage, deadline)

    def _check_peers(self, arrivals: int, deadline: float) -> float:
        """Raise if a missing rank is gone or the time is over; else give the deadline."""
        missing = [rank for rank in range(len(self._peers)) if self._is_missing(rank, arrivals)]
        for rank in missing:
            peer = self._peers[rank]
            if not peer.is_alive():
                raise RankError(
                    f"rank {rank} (process {peer.pid}) is gone; rank {self._rank} waited"
                )
        if deadline == 0.0:
            return time.monotonic() + self._timeout_s
        if missing and time.monotonic() > deadline:
            raise RankError(
                f"rank {missing[0]} did not come to operation {self._operation} within "
                f"{self._timeout_s:g} s; rank {self._rank} waited"
            )
        return deadline

    def _is_missing(self, rank: int, arrivals: int) -> bool:
        return bool(library.load().is_missing(self._base, rank, self._operation, arrivals))


def join(*, rank: int, size: int, timeout_s: float) -> SharedMemoryGroup | None:
    """Map one segment on all ranks of the initialised process group; None if that cannot be.

    All ranks get the same answer: they share memory only if every one of them could map it.
    """
    me = Peer.here()
    reason = _unfit(size)
    descriptor = -1
    offer: list[tuple[str, bytes] | None] = [None]
    if rank == 0 and not reason:
        try:
            descriptor, token = _create(size)
            offer = [(f"/proc/{me.pid}/fd/{descriptor}", token)]
        except OSError as exc:
            reason = f"no memory of {_segment_bytes(size):,} bytes: {exc}"
    dist.broadcast_object_list(offer, src=0)
    segment = None
    if offer[0] is not None and not reason:
        try:
            segment = _map(*offer[0], size=size)
        except (OSError, ValueError) as exc:
            reason = f"the memory of rank 0 cannot be mapped: {exc}"
    answers: list[tuple[str, Peer]] = [("", me)] * size
    dist.all_gather_object(answers, (reason, me))
    if descriptor >= 0:
        os.close(descriptor)
    reasons = [f"rank {r}: {text}" for r, (text, _) in enumerate(answers) if text]
    if segment is None or reasons:
        if rank == 0:
            logger.warning("ranks add up through sockets (gloo), which is slower: %s", reasons)
        return None
    if rank == 0:
        logger.info("%d ranks add up in shared memory", size)
    peers = [peer for _, peer in answers]
    return SharedMemoryGroup(segment, rank=rank, peers=peers, timeout_s=timeout_s)


def _unfit(size: int) -> str:
    """Why this rank cannot take part, empty if it can."""
    if size > MAX_RANKS:
        return f"{size} ranks, at most {MAX_RANKS} share memory"
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd"
    if reason := unavailable():
        return reason
    try:
        library.load()
    except NativeBuildError as exc:
        return str(exc)
    return ""


def _segment_bytes(size: int) -> int:
    return _HEADER_BYTES + 2 * size * _CAPACITY


def _create(size: int) -> tuple[int, bytes]:
    """A segment whose memory is there for certain, and the token at the end of its header."""
    token = secrets.token_bytes(16)
    descriptor = os.memfd_create("plait", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, _segment_bytes(size))
        os.pwrite(descriptor, token, _TOKEN_AT)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, token


def _map(path: str, token: bytes, *, size: int) -> mmap.mmap:
    """Map the segment at `path`.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is that of another host or container, where the path leads elsewhere.
    """
    with open(path, "r+b", buffering=0) as file:
        segment = mmap.mmap(file.fileno(), _segment_bytes(size))
    if segment[_TOKEN_AT:_HEADER_BYTES] != token:
        raise ValueError("it does not hold the token of rank 0")
    return segment


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time of a process; the name before them may hold anything."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
