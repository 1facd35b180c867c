"""One token of the selective state space recurrence of Mamba-2."""

from plait.kernels.selective_state_update.op import selective_state_update

__all__ = ["selective_state_update"]
