"""Chunked SSD forward of a Mamba-2 mixer, for training in place of transformers' reference.

Shapes: B batch, L length, K number of chunks, C chunk, H heads, G groups, P head dim, N state dim,
W conv width.
Source: Dao & Gu 2024 (Mamba-2), section 6.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, chunk: int) -> Tensor:
    """Scan whole sequences from a zero state, by matrix products inside and between chunks.

    Args:
        x: (B, L, H, P), the values; all arguments have its dtype.
        dt: (B, L, H) after bias and softplus.
        a: (H,), negative.
        b: (B, L, G, N), what goes into the state.
        c: (B, L, G, N), what is read from it.
        chunk: tokens in a chunk; L need not divide by it.
    Returns:
        (B, L, H, P), without the skip connection.
    """
    batch, length, heads, head_dim = x.shape
    padding = -length % chunk
    if padding:
        x, b, c = (F.pad(t, (0, 0, 0, 0, 0, padding)) for t in (x, b, c))
        dt = F.pad(dt, (0, 0, 0, padding))
    num_chunks = (length + padding) // chunk

    def by_chunk(t: Tensor) -> Tensor:
        """(B, KC, H, ...) -> (B, K, H, C, ...)"""
        return t.reshape(batch, num_chunks, chunk, *t.shape[2:]).transpose(2, 3)

    # 1. Chunks, and the decay from a chunk's start to each of its tokens, as a logarithm.
    x = by_chunk(x * dt[..., None])  # (B, K, H, C, P)
    decay = by_chunk(dt * a).cumsum(-1)  # (B, K, H, C)
    repeats = heads // b.shape[2]
    b, c = (by_chunk(t).repeat_interleave(repeats, 2) for t in (b, c))  # (B, K, H, C, N)

    # 2. What tokens of one chunk read from each other.
    is_past = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    between = decay[..., :, None] - decay[..., None, :]  # (B, K, H, C, C)
    between = between.masked_fill(~is_past, float("-inf")).exp()
    y = (c @ b.transpose(-1, -2) * between) @ x  # (B, K, H, C, P)

    # 3. The state that each chunk adds, and the one that it starts from.
    to_end = (decay[..., -1:] - decay).exp()
    added = (b * to_end[..., None]).transpose(-1, -2) @ x  # (B, K, H, N, P)
    state = x.new_zeros(batch, heads, b.shape[-1], head_dim)
    starts = []
    for k in range(num_chunks):
        starts.append(state)
        state = state * decay[:, k, :, -1].exp()[..., None, None] + added[:, k]

    # 4. What tokens read from earlier chunks.
    y = y + (c @ torch.stack(starts, 1)) * decay.exp()[..., None]
    return y.transpose(2, 3).flatten(1, 2)[:, :length]


def mixer_forward(
    mixer: Any,  # noqa: ANN401 - a GraniteMoeHybridMambaLayer: transformers is not typed here
    hidden_states: Tensor,
    *,
    chunk: int,
    **_ignored: object,
) -> Tensor:
    """Apply a transformers Mamba-2 mixer to whole unpadded sequences.

    Args:
        hidden_states: (B, L, D).
        _ignored: the cache and mask that transformers hands over; both are None in training.
    Returns:
        (B, L, D).
    """
    batch, length, _ = hidden_states.shape
    inner, heads = mixer.intermediate_size, mixer.num_heads
    groups, state_dim = mixer.n_groups, mixer.ssm_state_size
    sizes = [inner, mixer.conv_dim, heads]
    gate, xbc, dt = torch.split(mixer.in_proj(hidden_states), sizes, -1)

    # W shifted products are faster on a CPU than conv1d and its backward pass.
    weight = mixer.conv1d.weight[:, 0]  # (channels, W)
    width = weight.shape[1]
    padded = F.pad(xbc.float(), (0, 0, width - 1, 0))
    shifted = (padded[:, i : i + length] * weight[:, i] for i in range(width))
    xbc = F.silu(sum(shifted, start=mixer.conv1d.bias))

    x, b, c = torch.split(xbc, [inner, groups * state_dim, groups * state_dim], -1)
    x = x.view(batch, length, heads, -1).float()
    b, c = (t.view(batch, length, groups, state_dim).float() for t in (b, c))
    dt = F.softplus(dt.float() + mixer.dt_bias)
    with torch.autocast("cpu", enabled=False):
        y = ssd(x, dt, -mixer.A_log.float().exp(), b, c, chunk=min(chunk, length))
    y = (y + x * mixer.D[:, None]).reshape(batch, length, inner)
    mixed: Tensor = mixer.out_proj(mixer.norm(y, gate))
    return mixed


@contextmanager
def chunked_forward(model: torch.nn.Module, *, chunk: int) -> Iterator[None]:
    """Give the Mamba-2 mixers of `model` this module's forward; on leaving, their own again."""
    mixers = [module for module in model.modules() if hasattr(module, "A_log")]
    for mixer in mixers:
        mixer.forward = partial(mixer_forward, mixer, chunk=chunk)
    try:
        yield
    finally:
        for mixer in mixers:
            del mixer.forward
