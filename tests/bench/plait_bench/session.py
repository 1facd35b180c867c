"""Runs the engines of one model in turns, round by round, and never skips one in silence."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from plait_bench.cases import Case, EngineOptions, Timing, make_prompts
from plait_bench.installs import InstallError, Installs
from plait_bench.process import Worker, WorkerError, environment
from plait_bench.registry import EngineSpec
from plait_bench.results import CaseResult, Measurement, agreement

_GREEDY_TOKENS: Final = 16
_GREEDY_PROMPT: Final = 24
REFERENCE_ENGINE: Final = "transformers-fp32"
SLOW_FACTOR: Final = 4.0


class TimedEngine(Protocol):
    """The part of `Worker` that a round needs."""

    def time(self, case: Case, prompts: list[list[int]]) -> Timing: ...


def start_worker(
    spec: EngineSpec,
    checkpoint: Path,
    installs: Installs,
    *,
    threads: int,
    python_path: str,
    logs: Path,
    tensor_parallel_size: int = 1,
    executor: str = "inline",
) -> Worker:
    """A loaded engine; raises `WorkerError` or `InstallError`."""
    python = installs.python(spec.environment)
    model = installs.gguf(checkpoint, spec.gguf) if spec.gguf else checkpoint
    worker = Worker(
        f"plait_bench.engines.{spec.module}",
        EngineOptions(
            model=str(model),
            dtype=spec.dtype,
            threads=threads,
            is_compiled=spec.is_compiled,
            quantization=spec.quantization,
            tensor_parallel_size=tensor_parallel_size,
            executor=executor,
        ),
        python=python,
        variables=environment(
            threads=threads,
            python_path="" if spec.environment else python_path,
            extra=spec.variables,
        ),
        log=logs / f"{checkpoint.name}-{spec.name}-tp{tensor_parallel_size}.log",
    )
    try:
        worker.load()
    except WorkerError:
        worker.close()
        raise
    return worker


def start_all(
    specs: list[EngineSpec],
    start: Callable[[EngineSpec], Worker],
    stack: contextlib.ExitStack,
) -> tuple[dict[str, Worker], dict[str, str]]:
    """The engines that start, by name, and why the others do not."""
    workers: dict[str, Worker] = {}
    failures: dict[str, str] = {}
    for spec in specs:
        print(f"loading {spec.name}", flush=True)
        try:
            workers[spec.name] = stack.enter_context(start(spec))
        except (WorkerError, InstallError) as exc:
            failures[spec.name] = str(exc)
            print(f"  failed: {exc}", flush=True)
    return workers, failures


def run_case(
    result: CaseResult,
    engines: dict[str, TimedEngine],
    *,
    vocab_size: int,
    rounds: int,
) -> None:
    """One uncounted round to warm up, then the counted ones; an engine that fails drops out.

    One that takes `SLOW_FACTOR` times as long as the fastest is counted once.
    """
    case = result.case
    slow: set[str] = set()
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    errors: dict[str, str] = {}
    for round_idx in range(rounds + 1):
        prompts = make_prompts(case, vocab_size=vocab_size, round_idx=round_idx)
        for name, engine in engines.items():
            if name in errors or name in slow:
                continue
            try:
                timing = engine.time(case, prompts)
            except WorkerError as exc:
                errors[name] = str(exc)
                print(f"  {name} failed at {case.name}: {exc}", flush=True)
                continue
            if round_idx:
                seconds[name].append(timing.of(case))
        if round_idx == 1 and (
            first := {name: times[0] for name, times in seconds.items() if times}
        ):
            slow = {name for name in first if first[name] > SLOW_FACTOR * min(first.values())}
    for name, times in seconds.items():
        error = errors.get(name)
        result.measurements[name] = Measurement(seconds=() if error else tuple(times), error=error)


def compare_greedy(workers: dict[str, Worker], *, vocab_size: int) -> dict[str, str]:
    """How far every engine draws the tokens of transformers in float32, else of the first one."""
    case = Case(name="greedy", batch=1, prompt_tokens=_GREEDY_PROMPT)
    prompt = make_prompts(case, vocab_size=vocab_size, round_idx=0)[0]
    drawn: dict[str, list[int]] = {}
    failed: dict[str, str] = {}
    for name, worker in workers.items():
        try:
            reply = worker.call("greedy", prompt=prompt, num_tokens=_GREEDY_TOKENS)
            drawn[name] = reply["tokens"]
        except WorkerError as exc:
            failed[name] = f"failed: {exc}"
    if not drawn:
        return failed
    reference = drawn.get(REFERENCE_ENGINE) or next(iter(drawn.values()))
    return {name: agreement(reference, tokens) for name, tokens in drawn.items()} | failed
