"""Drawing tokens from logits: greedy, temperature, top-k, top-p, min-p, by seed and position.

Every rank draws for itself from the same gathered logits and gets the same tokens, since the
random number of a row comes from (seed, absolute position) alone.
"""

import zlib
from collections.abc import Sequence

import torch

from plait.worker.protocol import SamplingSpec, TokenLogprobs

_MASK = (1 << 64) - 1
# Lower ones draw the likeliest id just as well, but are no float32 to divide logits by.
_LEAST_TEMPERATURE = 1e-30


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) fixed by (seed, position): two rounds of the splitmix64 finaliser."""
    state = (seed * 0x9E3779B97F4A7C15 + position * 0xD1342543DE82EF95 + 1) & _MASK
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


def sample(
    logits: torch.Tensor,
    specs: Sequence[SamplingSpec],
    positions: Sequence[int],
    *,
    likeliest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token per row.

    Args:
        logits: (R, V) float32; ids that must never be drawn are -inf already.
        specs: how to draw, one per row.
        positions: (R,) absolute position of the token to be drawn.
        likeliest: (R,) the index of the largest logit of each row, if that is known already.
    Returns:
        (R,) int64 token ids. A row with non-finite logits gets some id; the caller checks.
    """
    banned = [
        (row, token)
        for row, (spec, position) in enumerate(zip(specs, positions, strict=True))
        if position < spec.banned_until
        for token in spec.banned_token_ids
        if token < logits.shape[-1]
    ]
    if banned:
        rows, tokens = zip(*banned, strict=True)
        logits = logits.clone()
        logits[list(rows), list(tokens)] = -torch.inf
        likeliest = None
    result = logits.argmax(dim=-1) if likeliest is None else likeliest
    drawn = [row for row, spec in enumerate(specs) if spec.temperature > 0]
    if drawn:
        result = result.clone()
        index = torch.tensor(drawn, device=logits.device)
        result[index] = _draw(
            logits[index], [specs[row] for row in drawn], [positions[row] for row in drawn]
        )
    return result


def _draw(
    logits: torch.Tensor, specs: Sequence[SamplingSpec], positions: Sequence[int]
) -> torch.Tensor:
    """Inverse-CDF draw over the ids that top-k, top-p and min-p leave, in falling order."""

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    vocab_size = logits.shape[-1]
    temperatures = column([max(spec.temperature, _LEAST_TEMPERATURE) for spec in specs])
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    rank = torch.arange(vocab_size, device=logits.device)
    keep = rank < column([spec.top_k or vocab_size for spec in specs], torch.int64)
    before = probs.cumsum(dim=-1) - probs
    keep &= before < column([spec.top_p for spec in specs])
    keep &= probs >= column([spec.min_p for spec in specs]) * probs[:, :1]
    keep &= probs > 0  # a threshold that rounds up to the whole mass must not reach an id at -inf
    keep[:, 0] = True
    mass = (probs * keep).cumsum(dim=-1)
    draws = [uniform(spec.seed, position) for spec, position in zip(specs, positions, strict=True)]
    threshold = column(draws) * mass[:, -1:]
    choice = (mass <= threshold).sum(dim=-1, keepdim=True)
    last_kept = (keep * rank).amax(dim=-1, keepdim=True)
    return ids.gather(-1, torch.minimum(choice, last_kept)).squeeze(-1)


def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, specs: Sequence[SamplingSpec]
) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities of the raw model for the rows that ask for them.

    Args:
        logits: (R, V) float32.
        tokens: (R,) the drawn tokens.
    """
    wanted = [row for row, spec in enumerate(specs) if spec.num_logprobs is not None]
    if not wanted:
        return ()
    index = torch.tensor(wanted, device=logits.device)
    values = logits[index].log_softmax(dim=-1)
    chosen = values.gather(-1, tokens[index][:, None]).squeeze(-1).tolist()
    most = max(specs[row].num_logprobs or 0 for row in wanted)
    top = values.topk(most, dim=-1)
    top_values, top_ids = top.values.tolist(), top.indices.tolist()
    result: list[TokenLogprobs | None] = [None] * len(specs)
    for i, row in enumerate(wanted):
        count = specs[row].num_logprobs or 0
        result[row] = TokenLogprobs(
            logprob=chosen[i],
            top_ids=tuple(top_ids[i][:count]),
            top_logprobs=tuple(top_values[i][:count]),
        )
    return tuple(result)


def token_digest(tokens: Sequence[int]) -> int:
    """A checksum by which the controller sees that all ranks drew the same tokens."""
    return zlib.crc32(repr(list(tokens)).encode())
