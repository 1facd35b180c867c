"""selective_scan in torch: exponentials and outputs of a whole chunk at once, states one by one.

T packed tokens, R rows, L tokens of a chunk, C channels, N state dim, S slots.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype
from plait.kernels.rounding import StochasticRounding, store_state
from plait.kernels.step_size import discretise_step

_CHUNK: Final = 32


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    cu_seqlens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    has_initial_state: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    checkpoint_tokens: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    rounding: StochasticRounding | None = None,
) -> Tensor:
    dtype = accumulate_dtype(x.dtype)
    rates = A.to(dtype)
    step = discretise_step(dt, dt_bias, dt_softplus, dt_limit, dtype)  # (T, C)
    checkpoints = _by_token(checkpoint_tokens, checkpoint_slots)
    bounds = cu_seqlens.tolist()
    reads, writes = (read_slots * has_initial_state).tolist(), write_slots.tolist()
    out = x.new_zeros(x.shape)
    for row, (start, stop) in enumerate(pairwise(bounds)):
        if writes[row] == 0:
            continue
        h = x.new_zeros(state.shape[1:], dtype=dtype)  # (C, N)
        if reads[row] != 0:
            h.copy_(state[reads[row]])
        for chunk in _chunks(start, stop, checkpoints):
            inputs = x[chunk].to(dtype)  # (L, C)
            states = _advance(h, inputs, step[chunk], rates, B[chunk].to(dtype))  # (L, C, N)
            h = states[-1]
            y = (states @ C[chunk].to(dtype)[..., None]).squeeze(-1)  # (L, C)
            if D is not None:
                y += D.to(dtype) * inputs
            if z is not None:
                y *= F.silu(z[chunk].to(dtype))
            out[chunk] = y
            for slot in checkpoints.get(chunk.stop - 1, ()):
                store_state(state[slot], h, rounding, row, offset=chunk.stop - 1 - start)
        store_state(state[writes[row]], h, rounding, row, offset=stop - 1 - start)
    return out


def _advance(h: Tensor, x: Tensor, step: Tensor, rates: Tensor, B: Tensor) -> Tensor:
    """The states (L, C, N) after each token of a chunk that starts from `h`."""
    decay = (step[..., None] * rates).exp_()  # (L, C, N)
    states = (step * x)[..., None] * B[:, None, :]  # the inputs, until they are added up
    for decay_t, state_t in zip(decay, states, strict=True):
        h = state_t.addcmul_(decay_t, h)
    return states


def _by_token(tokens: Tensor | None, slots: Tensor | None) -> dict[int, list[int]]:
    """The slots to store the state in, by the token that it is stored after."""
    checkpoints: dict[int, list[int]] = {}
    if tokens is not None and slots is not None:
        for token, slot in zip(tokens.tolist(), slots.tolist(), strict=True):
            if slot != 0:
                checkpoints.setdefault(token, []).append(slot)
    return checkpoints


def _chunks(start: int, stop: int, checkpoints: Iterable[int]) -> Iterator[slice]:
    """Runs of at most _CHUNK tokens, the last of which only may be a checkpoint."""
    cuts = [token + 1 for token in checkpoints if start <= token < stop - 1]
    for first, last in pairwise([start, *cuts, stop]):
        for begin in range(first, last, _CHUNK):
            yield slice(begin, min(begin + _CHUNK, last))
