"""Results as a table that is readable in a terminal and as Markdown."""

from collections.abc import Sequence
from typing import Final

from plait_bench.registry import ENGINES, EngineSpec
from plait_bench.results import CaseResult, Measurement, ModelResult, Report
from plait_bench.session import SLOW_FACTOR

_ERROR_LENGTH: Final = 160


def model_text(result: ModelResult) -> str:
    """The tables of one model, and what went wrong."""
    engines = [ENGINES[name] for name in _engine_names(result)]
    parts = [
        f"### {result.name}, {result.num_parameters / 1e6:.0f} M parameters",
        "",
        _limits(result),
    ]
    parts += ["", *_rates(result, engines), "", *_shares(result, engines)]
    if result.greedy:
        counts = ", ".join(f"{name} {count}" for name, count in result.greedy.items())
        parts += ["", f"Greedy tokens as transformers in float32 draws them: {counts}."]
    errors = _errors(result)
    if errors:
        parts += ["", "Without numbers:", "", *errors]
    return "\n".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table with aligned columns; all but the first are right-aligned."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join((first, *rest)) + " |"

    return [line(header), _rule(widths), *map(line, rows)]


def _rule(widths: Sequence[int]) -> str:
    first, *rest = widths
    return "| " + " | ".join(("-" * first, *("-" * (width - 1) + ":" for width in rest))) + " |"


def _engine_names(result: ModelResult) -> list[str]:
    """Every engine that has a number or an error, in the registry's order."""
    seen = set(result.failures)
    for case in result.cases:
        seen |= set(case.measurements)
    return [name for name in ENGINES if name in seen]


def _limits(result: ModelResult) -> str:
    limits = result.limits
    gemm = ", ".join(
        f"{limits.gemm(rows) / 1e9:.0f} at {rows}" for rows in limits.gemm_flops["float32"]
    )
    return (
        f"This machine: reads {limits.read_bytes / 1e9:.1f} GB/s, copies "
        f"{limits.copy_bytes / 1e9:.1f} GB/s, float32 vectors "
        f"{limits.vector_flops / 1e9:.0f} GFLOP/s, matrix products in GFLOP/s by rows: {gemm}; "
        f"best {limits.peak_gemm / 1e9:.0f}."
    )


def _rates(result: ModelResult, engines: list[EngineSpec]) -> list[str]:
    """A row per engine, a column per case: median and range of tokens per second."""
    rows = [
        [engine.name, *(_rate(case, engine.name) for case in result.cases)] for engine in engines
    ]
    return table(["tokens/s", *(case.case.name for case in result.cases)], rows)


def _rate(case: CaseResult, engine: str) -> str:
    measured = case.measurements.get(engine, Measurement())
    if not measured.seconds:
        return "failed"
    rates = measured.rates(case.case)
    return f"{measured.rate(case.case):.1f} ({min(rates):.1f}-{max(rates):.1f})"


def _shares(result: ModelResult, engines: list[EngineSpec]) -> list[str]:
    """A row per case and kind of Plait: against the best peer and against the machine."""
    rows = []
    for own in engines:
        if not own.is_plait:
            continue
        peers = [e.name for e in engines if e.group == own.group and not e.is_plait]
        for case in result.cases:
            ratio = case.ratio(own.name, peers)
            rows.append(
                [
                    f"{own.name}, {case.case.name}",
                    f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})" if ratio else "-",
                    ratio.peer if ratio else "-",
                    *_limit_shares(case, own, result),
                ]
            )
    header = ["", "ratio", "to the best peer", "roofline", "strict roofline", "read bandwidth"]
    return table(header, rows)


def _limit_shares(case: CaseResult, own: EngineSpec, result: ModelResult) -> list[str]:
    """Shares of both rooflines, and of the read bandwidth where one sequence decodes."""
    has_roofline = own.quantization is None
    bandwidth = case.bandwidth_share(own.name, result.limits, element_bytes=own.element_bytes)
    return [
        _percent(case.roofline_share(own.name) if has_roofline else None),
        _percent(case.roofline_share(own.name, is_strict=True) if has_roofline else None),
        _percent(bandwidth if case.case.batch == 1 else None),
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _errors(result: ModelResult) -> list[str]:
    lines = [f"- {name}: {_short(text)}" for name, text in result.failures.items()]
    for case in result.cases:
        lines += [
            f"- {name}, {case.case.name}: {_short(measured.error)}"
            for name, measured in case.measurements.items()
            if measured.error is not None and name not in result.failures
        ]
    return lines


def _short(text: str) -> str:
    return text if len(text) <= _ERROR_LENGTH else text[: _ERROR_LENGTH - 3] + "..."


def document(report: Report) -> str:
    """The published page."""
    machine = report.machine
    settings = report.settings
    features = ", ".join(machine["features"]) or "none of those that matter here"
    return "\n".join(
        [
            "# CPU benchmarks",
            "",
            "Written by `make bench`; every number is in [cpu.json](cpu.json).",
            "",
            f"{machine['processor']}, instruction sets {features}; {settings['threads']} "
            f"thread(s), {settings['rounds']} rounds in which the engines take turns, medians with "
            f"the range in brackets. Random weights; a prefill case is named by its tokens, a "
            f"decode case by its batch, of {settings['steps']} steps after prompts of 64 tokens. "
            f"An engine more than {SLOW_FACTOR:g} times slower than the fastest is timed once.",
            "",
            "- ratio: Plait's rate over that of the fastest peer, round by round",
            "- roofline: the least time, with matrix products at the best rate that torch reaches "
            "at that number of rows, over the measured time",
            "- strict roofline: the same with the best rate at any number of rows",
            "- read bandwidth: bytes of the weights over the time of a step",
            "- weights of 8 bits have no roofline here: the rate of integer products is not "
            "measured",
            "",
            "![Plait beside the best peer and the roofline](cpu.png)",
            "",
            *(model_text(model) + "\n" for model in report.models),
            "Versions: " + "; ".join(_versions(report)) + ".",
            "",
        ]
    )


def _versions(report: Report) -> list[str]:
    seen: dict[str, None] = {}
    for model in report.models:
        for versions in model.versions.values():
            for name, value in versions.items():
                if name != "features":
                    seen[f"{name} {value}"] = None
    return list(seen)
