"""A checkpoint as the benchmark sees it: its spec, its operators, its limits on this machine."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.worker.architectures import load_spec
from plait.worker.parameters import rank_parameters
from plait.worker.spec import ModelSpec
from plait_bench.cases import Case, EngineOptions
from plait_bench.process import Worker, environment
from plait_bench.results import CaseResult
from plait_bench.roofline import Limits, Operator, Pass, case_seconds, operators, weights_read


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModel:
    """A checkpoint folder and what its config says."""

    name: str
    folder: Path
    spec: ModelSpec

    @classmethod
    def load(cls, name: str, folder: Path) -> "BenchModel":
        return cls(name=name, folder=folder, spec=load_spec(str(folder)))

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel for parameter in rank_parameters(self.spec, tp=1, rank=0))

    def operators(self, case: Case) -> list[Operator]:
        return operators(self.spec, Pass.of_case(case))

    def case_result(self, case: Case, limits: Limits) -> CaseResult:
        """A case without measurements yet."""
        ops = self.operators(case)
        return CaseResult(
            case=case,
            roofline_s=case_seconds(ops, case, limits, is_strict=False),
            strict_roofline_s=case_seconds(ops, case, limits, is_strict=True),
            weights_read=weights_read(ops),
        )


class MachineProbe:
    """Measures what the machine can do, in a process bound as the engines are."""

    def __init__(self, *, threads: int, log: Path) -> None:
        self._worker = Worker(
            "plait_bench.engines.machine_worker",
            EngineOptions(model="", dtype="float32", threads=threads),
            python=Path(sys.executable),
            variables=environment(threads=threads, python_path=own_python_path(), extra={}),
            log=log,
        )
        self._worker.load()

    def facts(self) -> dict[str, Any]:
        return self._worker.call("facts")

    def limits(self, model: BenchModel, cases: Sequence[Case]) -> Limits:
        """Limits for the matrices of a model at every number of rows that the cases have."""
        shapes: Counter[tuple[int, int]] = Counter()
        rows: set[int] = set()
        for case in cases:
            products = [op for op in model.operators(case) if op.kind == "gemm"]
            rows |= {op.rows for op in products}
            # That of the head would not stay in any cache.
            layers = (op.shape for op in products if op.name != "lm_head" and op.shape)
            shapes = Counter(layers)
        reply = self._worker.call(
            "limits",
            shapes=[[*shape, count] for shape, count in shapes.items()],
            rows=sorted(rows),
        )
        # JSON has no integers as names.
        gemm = {
            dtype: {int(count): rate for count, rate in by_rows.items()}
            for dtype, by_rows in reply.pop("gemm_flops").items()
        }
        return Limits(**reply, gemm_flops=gemm)

    def close(self) -> None:
        self._worker.close()


def own_python_path() -> str:
    """Where processes of this environment find what this one finds outside its packages."""
    return os.environ.get("PYTHONPATH", "")
