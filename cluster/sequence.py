"""A sequence inside the scheduler: tokens so far, what is computed, what it holds."""

from enum import Enum, auto

from plait.cluster.pages import Slot
from plait.cluster.request import RequestSpec


class Phase(Enum):
    """Where a sequence stands. DONE covers finished, failed and aborted ones."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    DONE = auto()


class Sequence:
    """One continuation on its way through the engine.

    `tokens` are prompt and output so far. `num_computed` counts positions that a step has computed
    or will have computed once the steps in flight are back; `num_pending` counts tokens that those
    steps will draw. A sequence that is preempted keeps its tokens and starts at position 0 again.
    """

    def __init__(self, spec: RequestSpec, *, order: int, arrival_s: float) -> None:
        self.spec = spec
        self.order = order  # of arrival
        self.arrival_s = arrival_s
        self.was_admitted = False
        self.last_token_s: float | None = None
        self.tokens = [*spec.prompt_token_ids, *spec.output_token_ids]
        self.phase = Phase.WAITING
        self.num_computed = 0
        self.num_pending = 0
        self.num_in_flight = 0  # steps in flight that touch this sequence's units
        self.seat: int | None = None
        self.slot: Slot | None = None
        self.blocks: list[list[int]] = []  # by kv kind
        self.is_releasing = False

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def num_output(self) -> int:
        """Tokens drawn so far, those of earlier attempts included."""
        return len(self.tokens) - len(self.spec.prompt_token_ids)

    @property
    def wants_token(self) -> bool:
        """Whether another token may still be drawn, counting those in flight."""
        return self.num_output + self.num_pending < self.spec.max_tokens

    @property
    def length(self) -> int:
        """Tokens known or in flight: positions that need cache once computed."""
        return len(self.tokens) + self.num_pending
