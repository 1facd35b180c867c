"""What "the same logits" means in the conformance suite."""

import torch

TOLERANCE = 1e-4  # of the standard deviation of the logits
CLEAR_GAP = 1e-3  # between the two likeliest tokens, above which greedy must agree


def assert_same(logits: torch.Tensor, oracle: torch.Tensor) -> None:
    """Logits within tolerance everywhere, greedy tokens equal where they are not a near-tie."""
    assert torch.isfinite(logits).all(), "logits are not finite"
    error = (logits - oracle).abs().max() / oracle.std()
    assert error < TOLERANCE, f"largest error is {error:.2e} standard deviations"
    clear = clear_rows(oracle)
    assert clear.float().mean() >= 0.95, "too many near-ties to compare greedy tokens"
    assert torch.equal(logits.argmax(-1)[clear], oracle.argmax(-1)[clear]), "greedy tokens differ"


def clear_rows(logits: torch.Tensor) -> torch.Tensor:
    """(L, V) -> (L,) bool: whether the likeliest token stands out."""
    top = logits.topk(2, dim=-1).values
    return top[:, 0] - top[:, 1] > CLEAR_GAP
