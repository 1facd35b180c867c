"""Measurements of Plait alone: two ranks against one, and the time of the host in a step."""

import contextlib
import statistics
from collections.abc import Callable
from typing import Any, Final

from plait_bench.cases import CASES, Case, make_prompts, to_json
from plait_bench.process import Worker
from plait_bench.report import table
from plait_bench.results import CaseResult, Measurement
from plait_bench.session import run_case

TP_CASES: Final = ("decode-8", "prefill-2048")
_HOST_STEPS: Final = 64


def compare_tp(
    start: Callable[[int], Worker], *, vocab_size: int, rounds: int, steps: int
) -> dict[str, Any]:
    """Two ranks on two cores against one rank on one core, in turns; both as processes."""
    with contextlib.ExitStack() as stack:
        workers = {f"tp{size}": stack.enter_context(start(size)) for size in (1, 2)}
        results = {}
        for name in TP_CASES:
            result = CaseResult(
                case=CASES[name].with_steps(steps),
                roofline_s=0.0,
                strict_roofline_s=0.0,
                weights_read=0.0,
            )
            run_case(result, dict(workers), vocab_size=vocab_size, rounds=rounds)
            results[name] = result
    return {name: _speed_up(result) for name, result in results.items()}


def _speed_up(result: CaseResult) -> dict[str, Any]:
    one, two = (result.measurements.get(name, Measurement()) for name in ("tp1", "tp2"))
    if not one.seconds or not two.seconds:
        return {"error": one.error or two.error}
    ratio = result.ratio("tp2", ["tp1"])
    assert ratio is not None
    return {
        "tp1_tokens_s": one.rates(result.case),
        "tp2_tokens_s": two.rates(result.case),
        "ratio": ratio.median,
        "range": [ratio.low, ratio.high],
    }


def tp_text(model: str, speed_ups: dict[str, Any]) -> str:
    rows = []
    for name, entry in speed_ups.items():
        if "error" in entry:
            rows.append([f"{model}, {name}", "failed", "failed", str(entry["error"])[:120]])
            continue
        one, two = (statistics.median(entry[key]) for key in ("tp1_tokens_s", "tp2_tokens_s"))
        low, high = entry["range"]
        ratio = f"{entry['ratio']:.2f} ({low:.2f}-{high:.2f})"
        rows.append([f"{model}, {name}", f"{one:.1f}", f"{two:.1f}", ratio])
    return "\n".join(table(["", "TP 1 tokens/s", "TP 2 tokens/s", "ratio"], rows))


def profile_host(worker: Worker, *, vocab_size: int) -> dict[str, Any]:
    """Milliseconds of a decode step at batch 1, in kernels by op, and the rest."""
    case = Case(name="host", batch=1, prompt_tokens=64, num_steps=_HOST_STEPS)
    prompts = make_prompts(case, vocab_size=vocab_size, round_idx=0)
    reply = worker.call("host_time", case=to_json(case), prompts=prompts)
    kernels = {op: 1e3 * seconds for op, seconds in reply["kernels_s"].items()}
    step_ms = 1e3 * reply["step_s"]
    return {"step_ms": step_ms, "kernels_ms": kernels, "host_ms": step_ms - sum(kernels.values())}


def host_text(model: str, profile: dict[str, Any]) -> str:
    largest = sorted(profile["kernels_ms"].items(), key=lambda item: -item[1])
    kernels = ", ".join(f"{op} {ms:.2f}" for op, ms in largest)
    return (
        f"{model}: a decode step at batch 1 takes {profile['step_ms']:.2f} ms, "
        f"{profile['host_ms']:.2f} ms of it outside kernels; in kernels: {kernels}."
    )
