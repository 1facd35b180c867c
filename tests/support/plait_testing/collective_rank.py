"""A process that joins a group of ranks and runs what it is told, one pickled call at a time."""

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from plait.worker.collectives import TensorParallel
from plait.worker.errors import RankError


def reduce(group: TensorParallel, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Any:
    """Sum what `contribution` gives every rank."""
    return group.all_reduce(contribution(shape, dtype, seed, group.rank))


def gather(group: TensorParallel, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Any:
    return group.all_gather(contribution(shape, dtype, seed, group.rank))


def many(group: TensorParallel, sizes: list[int]) -> list[float]:
    """Back-to-back reductions of constant tensors: the worst deviation of each from its sum."""
    expected = sum(range(1, group.size + 1))
    return [
        float((group.all_reduce(torch.full((n,), group.rank + 1.0)) - expected * 1.0).abs().max())
        for n in sizes
    ]


def uses_shared_memory(group: TensorParallel) -> bool:
    return group._shared is not None


def pid(group: TensorParallel) -> int:
    return os.getpid()


def set_time_limit(group: TensorParallel, seconds: float) -> None:
    assert group._shared is not None
    group._shared._timeout_s = seconds


def cpu_seconds_while_waiting(group: TensorParallel, seconds: float) -> float:
    """What the other ranks burn while rank 0 sleeps."""
    if group.rank == 0:
        time.sleep(seconds)
    before = time.process_time()
    group.all_reduce(torch.ones(4))
    return time.process_time() - before


def contribution(shape: tuple[int, ...], dtype: torch.dtype, seed: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    return torch.randn(shape, generator=generator).to(dtype)


class Ranks:
    """`size` such processes."""

    def __init__(self, size: int, folder: Path, *, environment: dict[str, str] | None = None):
        context = multiprocessing.get_context("spawn")
        self.size = size
        self._pipes: list[Connection] = []
        self.processes = []
        saved = dict(os.environ)
        os.environ.update(environment or {}, OMP_NUM_THREADS="1")
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_main, args=(theirs, rank, size, f"file://{folder / 'rendezvous'}")
            )
            process.start()
            self._pipes.append(ours)
            self.processes.append(process)
        os.environ.clear()
        os.environ.update(saved)

    def start(self, function: Callable[..., Any], *args: Any, only: int | None = None) -> None:
        for rank, pipe in enumerate(self._pipes):
            if only in (None, rank):
                pipe.send((function, args))

    def results(self, only: int | None = None, timeout_s: float = 60.0) -> list[Any]:
        """What every rank gave; an exception of a rank is given, not raised."""
        pipes = self._pipes if only is None else [self._pipes[only]]
        assert all(pipe.poll(timeout_s) for pipe in pipes), "a rank hangs"
        return [pipe.recv() for pipe in pipes]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self.start(function, *args)
        return self.results()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _main(pipe: Connection, rank: int, size: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    group = TensorParallel.connect(
        rank=rank,
        size=size,
        device=torch.device("cpu"),
        rendezvous=rendezvous,
        timeout_s=60.0,
    )
    while True:
        function, args = pipe.recv()
        try:
            pipe.send(function(group, *args))
        except RankError as exc:
            pipe.send(exc)
