"""Compare Plait with its peers and with the limits of this machine: `make bench`.

Every engine runs in a process of its own with the same cores and threads, loads once, and takes its
turn in every round. Ratios above 1 mean that Plait is faster. Peers are installed on the first
run, which takes a while; what cannot be installed or fails is listed with its error.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from plait_bench.cases import CASES
from plait_bench.checkpoints import CONFIGS, make_checkpoint
from plait_bench.extras import compare_tp, host_text, profile_host, tp_text
from plait_bench.installs import Installs
from plait_bench.models import BenchModel, MachineProbe, own_python_path
from plait_bench.plot import save_plot
from plait_bench.process import Worker
from plait_bench.registry import DEFAULT_ENGINES, ENGINES, INT8_ENGINES, EngineSpec
from plait_bench.report import document, model_text
from plait_bench.results import ModelResult, Report
from plait_bench.session import compare_greedy, run_case, start_all, start_worker

_ROOT = Path(__file__).resolve().parents[2]
_PUBLISHED = _ROOT / "docs" / "benchmarks"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(flag: str, known: Sequence[str], default: Sequence[str]) -> None:
        parser.add_argument(
            flag,
            nargs="+",
            choices=known,
            default=default,
            metavar="NAME",
            help=f"of {', '.join(known)}",
        )

    names("--models", tuple(CONFIGS), tuple(CONFIGS))
    names("--cases", tuple(CASES), tuple(CASES))
    names("--engines", tuple(ENGINES), DEFAULT_ENGINES)
    parser.add_argument(
        "--quantization", choices=["int8"], help="also compare with weights of 8 bits"
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after a warm-up")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a round")
    parser.add_argument("--threads", type=int, default=1, help="cores and threads of an engine")
    parser.add_argument(
        "--tp",
        action="store_true",
        help="Plait on two ranks and cores against one, and nothing else",
    )
    parser.add_argument(
        "--profile-host",
        action="store_true",
        help="time of Plait outside kernels in a decode step, and nothing else",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=_ROOT / ".cache" / "bench",
        help="folder of checkpoints, environments and results",
    )
    parser.add_argument("--publish", action="store_true", help="write into docs/benchmarks")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.steps < 1 or options.threads < 1:
        parser.error("--rounds, --steps and --threads must be at least 1")
    if options.quantization:
        options.engines = list(dict.fromkeys((*options.engines, *INT8_ENGINES)))
    return options


class Bench:
    """One run of the command."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._cache: Path = options.cache.resolve()
        self._installs = Installs(self._cache)
        self._cases = [CASES[name].with_steps(options.steps) for name in options.cases]

    def models(self) -> list[BenchModel]:
        root = self._cache / "models"
        return [BenchModel.load(name, make_checkpoint(name, root)) for name in self._options.models]

    def compare(self) -> None:
        """Every model with every engine; what is known is written after each model."""
        probe = MachineProbe(
            threads=self._options.threads, log=self._cache / "logs" / "machine.log"
        )
        with contextlib.closing(probe):
            settings = {key: getattr(self._options, key) for key in ("threads", "rounds", "steps")}
            report = Report(machine=probe.facts(), settings=settings)
            for model in self.models():
                result = self._compare(model, probe)
                report.models.append(result)
                print("\n" + model_text(result) + "\n", flush=True)
                self._write(report)

    def tensor_parallel(self) -> None:
        for model in self.models():
            speed_ups = compare_tp(
                lambda size, model=model: self._start(
                    ENGINES["plait"], model, threads=1, size=size, executor="process"
                ),
                vocab_size=model.spec.vocab_size,
                rounds=self._options.rounds,
                steps=self._options.steps,
            )
            self._save(f"tp-{model.name}.json", speed_ups)
            print(tp_text(model.name, speed_ups), flush=True)

    def host(self) -> None:
        for model in self.models():
            with self._start(ENGINES["plait"], model) as worker:
                profile = profile_host(worker, vocab_size=model.spec.vocab_size)
            self._save(f"host-{model.name}.json", profile)
            print(host_text(model.name, profile), flush=True)

    def _compare(self, model: BenchModel, probe: MachineProbe) -> ModelResult:
        print(f"{model.name}: measuring the machine", flush=True)
        before = probe.limits(model, self._cases)
        with contextlib.ExitStack() as stack:
            specs = [ENGINES[name] for name in self._options.engines]
            workers, failures = start_all(specs, lambda spec: self._start(spec, model), stack)
            vocab_size = model.spec.vocab_size
            greedy = compare_greedy(workers, vocab_size=vocab_size)
            limits = before
            results = []
            for case in self._cases:
                result = model.case_result(case, limits)
                print(f"{model.name}: {case.name}", flush=True)
                run_case(result, dict(workers), vocab_size=vocab_size, rounds=self._options.rounds)
                results.append(result)
            limits = before.best_of(probe.limits(model, self._cases))
            for result in results:
                again = model.case_result(result.case, limits)
                result.roofline_s = again.roofline_s
                result.strict_roofline_s = again.strict_roofline_s
            return ModelResult(
                name=model.name,
                num_parameters=model.num_parameters,
                limits=limits,
                cases=results,
                versions={name: worker.versions for name, worker in workers.items()},
                failures=failures,
                greedy=greedy,
                notes={"backends": workers["plait"].call("backends")} if "plait" in workers else {},
            )

    def _start(
        self,
        spec: EngineSpec,
        model: BenchModel,
        *,
        threads: int | None = None,
        size: int = 1,
        executor: str = "inline",
    ) -> Worker:
        return start_worker(
            spec,
            model.folder,
            self._installs,
            threads=threads or self._options.threads,
            python_path=own_python_path(),
            logs=self._cache / "logs",
            tensor_parallel_size=size,
            executor=executor,
        )

    def _write(self, report: Report) -> None:
        folder = _PUBLISHED if self._options.publish else self._cache / "results"
        self._save("cpu.json", report.to_json(), folder)
        (folder / "cpu.md").write_text(document(report))
        save_plot(report, folder / "cpu.png")
        print(f"written: {folder}/cpu.json, cpu.md, cpu.png")

    def _save(self, name: str, value: object, folder: Path | None = None) -> None:
        folder = folder or self._cache / "results"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(value, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    bench = Bench(options)
    if options.tp:
        bench.tensor_parallel()
    if options.profile_host:
        bench.host()
    if not options.tp and not options.profile_host:
        bench.compare()
    return 0


if __name__ == "__main__":
    sys.exit(main())
