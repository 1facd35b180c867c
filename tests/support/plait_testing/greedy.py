"""Comparing greedy outputs token by token, where the model itself is sure of its choice."""

from collections.abc import Sequence
from dataclasses import dataclass

CLEAR_GAP = 0.05  # of log-probabilities in bf16, above which greedy must agree
LEAST_COMPARED = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyRun:
    """The tokens of an output as texts, and how far the runner-up was behind at each."""

    tokens: tuple[str, ...]
    gaps: tuple[float, ...]
    finish_reason: str

    @classmethod
    def of_completion(cls, choice: dict) -> "GreedyRun":
        """A choice of `/v1/completions` that was asked for with `logprobs` of 2."""
        logprobs = choice["logprobs"]
        gaps = []
        for top in logprobs["top_logprobs"]:
            values = sorted(top.values(), reverse=True)
            gaps.append(values[0] - values[1] if len(values) > 1 else 0.0)
        return cls(
            tokens=tuple(logprobs["tokens"]),
            gaps=tuple(gaps),
            finish_reason=choice["finish_reason"],
        )

    @property
    def text(self) -> str:
        return "".join(self.tokens)


@dataclass(slots=True)
class Comparison:
    """Outputs compared with what they were alone. A near-tie excuses all that comes after it."""

    num_compared: int = 0
    num_tokens: int = 0

    def add(self, alone: GreedyRun, tokens: Sequence[str]) -> None:
        """Compare a prefix of an output; raises AssertionError where it differs without excuse."""
        self.num_tokens += len(tokens)
        for position, token in enumerate(tokens):
            assert position < len(alone.tokens), f"goes on after {alone.text!r}: {tokens!r}"
            if token != alone.tokens[position]:
                gap = alone.gaps[position]
                assert gap <= CLEAR_GAP, (
                    f"token {position} is {token!r}, alone it is {alone.tokens[position]!r} "
                    f"by {gap:.3f}: {''.join(tokens)!r} against {alone.text!r}"
                )
                return
            self.num_compared += 1

    def check(self) -> None:
        assert self.num_tokens > 0
        assert self.num_compared >= LEAST_COMPARED * self.num_tokens, (
            f"only {self.num_compared} of {self.num_tokens} tokens could be compared"
        )
