"""The picture of a report: Plait against the best peer and against the roofline, case by case."""

from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from plait_bench.registry import ENGINES
from plait_bench.results import CaseResult, ModelResult, Report

_RATIO_COLOUR: Final = "#8fbcd4"
_ROOFLINE_COLOUR: Final = "#ecc27f"
_INK: Final = "#333333"
_WIDTH: Final = 0.62


def save_plot(report: Report, path: Path) -> None:
    """Write a PNG: a column per model; above the ratio, below the share of the roofline."""
    columns = len(report.models)
    figure, grid = pyplot.subplots(
        2, columns, figsize=(1.2 + 3.9 * columns, 6.6), sharey="row", squeeze=False
    )
    for column, model in enumerate(report.models):
        _ratios(grid[0][column], model, is_first=column == 0)
        _rooflines(grid[1][column], model, is_first=column == 0)
        grid[0][column].set_title(
            f"{model.name}, {model.num_parameters / 1e6:.0f} M", color=_INK, fontsize=11, pad=12
        )
    threads = report.settings["threads"]
    cores = "one CPU core" if threads == 1 else f"{threads} CPU cores"
    title = f"Plait on {cores}, bfloat16"
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, color=_INK, weight="bold")
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path, dpi=150, facecolor="white")
    pyplot.close(figure)


def _ratios(axes: Any, model: ModelResult, *, is_first: bool) -> None:
    """Bars of the ratio to the best peer, with the range of the rounds and the peer's name."""
    group = ENGINES["plait"].group
    peers = [name for name, spec in ENGINES.items() if spec.group == group and not spec.is_plait]
    for x, case in enumerate(model.cases):
        ratio = case.ratio("plait", peers)
        if ratio is None:
            axes.text(x, 0.05, "no peer", ha="center", color=_INK, fontsize=8)
            continue
        error = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
        axes.bar(x, ratio.median, _WIDTH, color=_RATIO_COLOUR)
        axes.errorbar(x, ratio.median, error, color=_INK, capsize=3, linewidth=1)
        axes.text(
            x, 0.06, ratio.peer, ha="center", va="bottom", color=_INK, fontsize=8, rotation=90
        )
        axes.annotate(
            f"{ratio.median:.2f}",
            (x, ratio.high),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            color=_INK,
            fontsize=9,
        )
    axes.axhline(1.0, color=_INK, linewidth=1, linestyle="--")
    _style(axes, model.cases, "times the best peer" if is_first else "")
    axes.margins(y=0.12)


def _rooflines(axes: Any, model: ModelResult, *, is_first: bool) -> None:
    """Bars of the share of the roofline, with a mark at that of the strict one."""
    for x, case in enumerate(model.cases):
        share = case.roofline_share("plait")
        strict = case.roofline_share("plait", is_strict=True)
        if share is None or strict is None:
            axes.text(x, 2, "failed", ha="center", color=_INK, fontsize=8)
            continue
        axes.bar(x, 100 * share, _WIDTH, color=_ROOFLINE_COLOUR)
        axes.hlines(100 * strict, x - _WIDTH / 2, x + _WIDTH / 2, color=_INK, linewidth=2)
        axes.annotate(
            f"{100 * share:.0f}",
            (x, 100 * max(share, strict)),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            color=_INK,
            fontsize=9,
        )
    axes.axhline(100, color=_INK, linewidth=1, linestyle="--")
    axes.set_ylim(0, max(115, axes.get_ylim()[1]))
    _style(axes, model.cases, "% of the roofline (line: strict)" if is_first else "")


def _style(axes: Any, cases: list[CaseResult], label: str) -> None:
    axes.set_xticks(range(len(cases)), [case.case.name.replace("-", "\n") for case in cases])
    axes.set_ylabel(label, color=_INK)
    axes.tick_params(colors=_INK, labelsize=9, length=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#aaaaaa")
