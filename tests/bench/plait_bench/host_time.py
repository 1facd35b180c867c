"""How much of a step is spent in C kernels, so that the rest is time of the host."""

from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from time import perf_counter
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from plait.kernels.dispatch import CANDIDATES


class KernelTimer:
    """Times every C function that is called while it is open; `seconds` is by op.

    Decode steps that were recorded before call the functions of that time, and are not seen.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._originals: list[tuple[SimpleNamespace, str, Any]] = []

    def reset(self) -> None:
        self.seconds.clear()

    def __enter__(self) -> Self:
        for op in CANDIDATES:
            functions = import_module(f"plait.kernels.{op}.native").library.load()
            for name, function in list(vars(functions).items()):
                self._originals.append((functions, name, function))
                setattr(functions, name, self._timed(op, function))
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
        def run(*arguments: object) -> object:
            start = perf_counter()
            result = function(*arguments)
            self.seconds[op] += perf_counter() - start
            return result

        return run
