"""What is measured. Standard library only: peers import this in environments of their own."""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

FIRST_ORDINARY_ID: Final = 3  # below are padding, begin and end


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch of prompts of one length, continued greedily.

    Without `num_steps` the time to the first token is the result, else that of so many decode
    steps after it.
    """

    name: str
    batch: int
    prompt_tokens: int
    num_steps: int = 0

    @property
    def is_decode(self) -> bool:
        return self.num_steps > 0

    @property
    def tokens(self) -> int:
        """Tokens in the timed part."""
        return self.batch * (self.num_steps if self.is_decode else self.prompt_tokens)

    def with_steps(self, num_steps: int) -> "Case":
        return replace(self, num_steps=num_steps) if self.is_decode else self


_CONTEXT: Final = 64
_STEPS: Final = 32
CASES: Final[Mapping[str, Case]] = {
    case.name: case
    for case in (
        Case(name="prefill-512", batch=1, prompt_tokens=512),
        Case(name="prefill-2048", batch=1, prompt_tokens=2048),
        Case(name="decode-1", batch=1, prompt_tokens=_CONTEXT, num_steps=_STEPS),
        Case(name="decode-8", batch=8, prompt_tokens=_CONTEXT, num_steps=_STEPS),
        Case(name="decode-32", batch=32, prompt_tokens=_CONTEXT, num_steps=_STEPS),
    )
}


def make_prompts(case: Case, *, vocab_size: int, round_idx: int) -> list[list[int]]:
    """Random ids, the same for every engine, others in every round: no cache of prefixes helps."""
    draw = random.Random(f"{case.name} {round_idx}")
    return [
        [draw.randrange(FIRST_ORDINARY_ID, vocab_size) for _ in range(case.prompt_tokens)]
        for _ in range(case.batch)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine loads a model. What it does not know it refuses."""

    model: str
    dtype: str
    threads: int
    max_batch: int = 32
    max_tokens: int = 2304  # of one sequence
    is_compiled: bool = False
    quantization: str | None = None
    tensor_parallel_size: int = 1
    executor: str = "inline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds until every sequence has its first token, and those of the steps after it."""

    first_token_s: float
    decode_s: float

    def of(self, case: Case) -> float:
        return self.decode_s if case.is_decode else self.first_token_s


def to_json(value: Case | EngineOptions | Timing) -> dict[str, Any]:
    return asdict(value)
