"""A single rank in this process: for offline use, and for GPU tests without Ray."""

from collections import deque

import torch

from plait.cluster.executors.base import Executor
from plait.worker import protocol
from plait.worker.collectives import TensorParallel
from plait.worker.rank import Rank


class InlineExecutor(Executor):
    """Rank 0 of 1, called directly. A submitted step runs when it is submitted."""

    def __init__(self, *, device: str) -> None:
        self.tensor_parallel_size = 1
        target = torch.device(device)
        self._rank = Rank(TensorParallel(), device=target)
        self._outputs: deque[protocol.StepOutput] = deque()

    def load(self, request: protocol.Load) -> list[protocol.Loaded]:
        return [self._rank.load(request)]

    def allocate(self, request: protocol.Allocate) -> list[protocol.Ready]:
        self._outputs.clear()
        return [self._rank.allocate(request)]

    def submit(self, step: protocol.StepInput) -> None:
        self._outputs.append(self._rank.step(step))

    def collect(self) -> protocol.StepOutput:
        return self._outputs.popleft()

    def shutdown(self) -> None:
        self._outputs.clear()
