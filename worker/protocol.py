"""What the controller and a rank say to each other, as plain values.

Every message is a frozen msgspec struct with a tag, so that one decoder reads them all. A step
carries only what changed: a rank remembers, by *seat*, the tokens, blocks and state slot of each
sequence that runs. A seat is a row of the rank's tables, lent to one sequence at a time.
"""

from typing import Literal

import msgspec

from plait.worker.plan import CacheLayout, CachePlan, SectionShape


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""


class Load(Message, frozen=True, kw_only=True):
    """Read this rank's slices of a checkpoint, build the layers and compare them with `layout`.

    `decodable_vocab_size` is how many ids the tokenizer can decode: no other id is ever sampled.
    With a `rounding_seed` SSM states of 16 bits are rounded stochastically.
    """

    model_path: str
    layout: CacheLayout
    dtype: str
    decodable_vocab_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    debug_poison: bool = False
    quantization: Literal["int8"] | None = None
    rounding_seed: int | None = None


class Loaded(Message, frozen=True, kw_only=True):
    """What a rank really built, and the memory that its arena will be taken from.

    `free_bytes` is what is left beside weights and a reserve, of `total_bytes` of the device.
    """

    layout_digest: str
    sections: tuple[SectionShape, ...]
    weight_bytes: int
    free_bytes: int
    total_bytes: int
    backends: dict[str, str]


class Allocate(Message, frozen=True, kw_only=True):
    """Allocate the arena of `plan` and run every shape class once."""

    plan: CachePlan


class Ready(Message, frozen=True, kw_only=True):
    """The arena stands and the rank is warm."""

    plan_digest: str
    arena_bytes: int


class SamplingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens of one sequence are drawn; checked before it comes here.

    temperature 0 is greedy. Random bits come from (seed, absolute position) alone.
    `banned_until` keeps `banned_token_ids` from being drawn at positions below it (min_tokens).
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int | None = None  # None: none; 0: only that of the drawn token
    banned_token_ids: tuple[int, ...] = ()
    banned_until: int = 0


class NewSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence takes a seat. `slot` is its state slot, 0 for models without recurrent layers."""

    seat: int
    slot: int
    generation: int
    sampling: SamplingSpec


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks appended to the block table of a seat, for one kv kind."""

    seat: int
    kind: int
    block_ids: tuple[int, ...]


class PrefillRow(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens of a sequence from position `start` on; `sample` draws a token after them."""

    seat: int
    start: int
    token_ids: tuple[int, ...]
    sample: bool


class StepInput(Message, frozen=True, kw_only=True):
    """One pass of the engine. Decode rows continue with the token last drawn for their seat.

    `set_tokens` overrides that last token (teacher forcing, replay). `poison` lists freed units
    per kind name, to be filled with NaN in debug mode.
    """

    step: int
    new: tuple[NewSequence, ...] = ()
    growth: tuple[Growth, ...] = ()
    prefill: tuple[PrefillRow, ...] = ()
    decode: tuple[int, ...] = ()
    set_tokens: tuple[tuple[int, int], ...] = ()
    poison: dict[str, tuple[int, ...]] = {}
    all_logits: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.prefill) + len(self.decode)


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Natural-log probabilities of the raw model, before any sampling transform."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class StepOutput(Message, frozen=True, kw_only=True):
    """Tokens of the sampled rows: prefill rows with `sample`, then decode rows, in order.

    Rank 0 gives all of it, the others only `token_digest`, which must agree. `finite` is False
    for a row whose logits hold NaN or infinity: its token means nothing. `logits` holds float32
    rows when they were asked for.
    """

    step: int
    token_ids: tuple[int, ...] = ()
    finite: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    token_digest: int = 0
    logits: bytes = b""


class Failure(Message, frozen=True, kw_only=True):
    """A rank could not do what it was told; `kind` is the class of the error."""

    kind: str
    message: str
    traceback: str


class Shutdown(Message, frozen=True, kw_only=True):
    """The rank ends after this."""


Request = Load | Allocate | StepInput | Shutdown
Reply = Loaded | Ready | StepOutput | Failure

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    return _request_decoder.decode(data)


def decode_reply(data: bytes) -> Reply:
    return _reply_decoder.decode(data)
