"""Measures the machine instead of an engine, in a process with the same threads and cores."""

from dataclasses import asdict
from typing import Any

from plait_bench.cases import Case, EngineOptions, Timing
from plait_bench.machine import describe, measure


class Machine:
    """Answers `limits` only."""

    def __init__(self, options: EngineOptions) -> None:
        self._threads = options.threads
        self.versions: dict[str, str] = {}

    def limits(self, shapes: list[list[int]], rows: list[int]) -> dict[str, Any]:
        """Shapes are (out, in, count)."""
        counts = {(out_dim, in_dim): count for out_dim, in_dim, count in shapes}
        return asdict(measure(shapes=counts, rows=rows, threads=self._threads))

    def facts(self) -> dict[str, Any]:
        return describe()

    def time(self, case: Case, prompts: list[list[int]]) -> Timing:
        raise NotImplementedError("the machine runs no case")

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        raise NotImplementedError("the machine runs no model")


def create(options: EngineOptions) -> Machine:
    return Machine(options)
