"""Heads that share something: the groups of B and C, the heads of the KV cache."""

import torch
from torch import Tensor


def regular_head_map(num_heads: int, num_targets: int, device: torch.device) -> Tensor:
    """(num_heads,) int64: equal runs of consecutive heads share a target."""
    return torch.arange(num_heads, device=device) // (num_heads // num_targets)
