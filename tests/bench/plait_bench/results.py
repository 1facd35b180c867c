"""Results as data: seconds of every round, and what is worked out from them."""

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from plait_bench.cases import Case
from plait_bench.roofline import BF16_BYTES, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """An engine at a case: seconds by round, or why there are none."""

    seconds: tuple[float, ...] = ()
    error: str | None = None

    def rates(self, case: Case) -> list[float]:
        """Tokens per second by round."""
        return [case.tokens / seconds for seconds in self.seconds]

    def rate(self, case: Case) -> float:
        """The median of the rounds."""
        return case.tokens / statistics.median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as fast as the peer that is the fastest by its median, round by round."""

    peer: str
    median: float
    low: float
    high: float


@dataclass(slots=True, kw_only=True)
class CaseResult:
    """A case with the least seconds it can take and the measurement of every engine."""

    case: Case
    roofline_s: float
    strict_roofline_s: float
    weights_read: float  # bytes of one pass in bfloat16
    measurements: dict[str, Measurement] = field(default_factory=dict)

    def ratio(self, engine: str, peers: list[str]) -> Ratio | None:
        """`engine` against the best of `peers`; None where either side has no numbers."""
        own = self.measurements.get(engine, Measurement()).seconds
        timed = [peer for peer in peers if self.measurements.get(peer, Measurement()).seconds]
        if not own or not timed:
            return None
        best = max(timed, key=lambda peer: self.measurements[peer].rate(self.case))
        theirs = self.measurements[best].seconds
        ratios = [peer_s / own_s for own_s, peer_s in zip(own, theirs, strict=False)]
        return Ratio(peer=best, median=statistics.median(ratios), low=min(ratios), high=max(ratios))

    def roofline_share(self, engine: str, *, is_strict: bool = False) -> float | None:
        """The least time over the median time."""
        seconds = self.measurements.get(engine, Measurement()).seconds
        least = self.strict_roofline_s if is_strict else self.roofline_s
        return least / statistics.median(seconds) if seconds else None

    def bandwidth_share(
        self, engine: str, limits: Limits, *, element_bytes: int = BF16_BYTES
    ) -> float | None:
        """Bytes of the weights over the time of a step, as a share of the read bandwidth."""
        seconds = self.measurements.get(engine, Measurement()).seconds
        if not seconds or not self.case.is_decode:
            return None
        step_s = statistics.median(seconds) / self.case.num_steps
        return self.weights_read * element_bytes / BF16_BYTES / step_s / limits.read_bytes


@dataclass(slots=True, kw_only=True)
class ModelResult:
    """A model with the machine's limits for its shapes.

    `greedy` has, by engine, how many tokens from the start are those of the first engine that
    could tell, of how many.
    """

    name: str
    num_parameters: int
    limits: Limits
    cases: list[CaseResult] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    greedy: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything of one run."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    models: list[ModelResult] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def agreement(reference: list[int], tokens: list[int]) -> str:
    """How many tokens from the start are the same, as "k of n"."""
    pairs = zip(reference, tokens, strict=False)
    same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(reference))
    return f"{same} of {len(reference)}"
