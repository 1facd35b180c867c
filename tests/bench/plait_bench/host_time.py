"""How much of a step is spent in kernels, so that the rest is time of the host."""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from types import ModuleType, TracebackType
from typing import Any

import torch

from plait.kernels.dispatch import CANDIDATES, implementation


class KernelTimer:
    """While open, times every function of the chosen kernel modules; `seconds` is by op.

    A function that another one of them calls counts as part of its caller.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._depth = 0
        self._originals: list[tuple[ModuleType, str, Any]] = []

    def reset(self) -> None:
        self.seconds.clear()

    def __enter__(self) -> "KernelTimer":
        for op in CANDIDATES:
            module = implementation(op, torch.device("cpu"))
            for name, function in inspect.getmembers(module, inspect.isfunction):
                if function.__module__ == module.__name__ and not name.startswith("_"):
                    self._originals.append((module, name, function))
                    setattr(module, name, self._timed(op, function))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._originals:
            setattr(*self._originals.pop())

    def _timed(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: object, **kwargs: object) -> object:
            if self._depth:
                return function(*args, **kwargs)
            self._depth += 1
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[op] += perf_counter() - start
                self._depth -= 1

        return run
