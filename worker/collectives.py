"""What the ranks of one model do together: sum partial results, gather shards."""

import datetime
import os

import torch
import torch.distributed as dist

from plait.kernels.native import recorded
from plait.worker.shared_memory import SharedMemoryGroup, join
from plait.worker.shared_memory.group import DTYPES


class TensorParallel:
    """This rank's place among `size` ranks, and the collectives between them.

    With one rank nothing is initialised and every collective is the identity. `shared` is how CPU
    ranks of one host talk; whatever it does not take goes through torch.distributed.
    """

    def __init__(
        self, *, rank: int = 0, size: int = 1, shared: SharedMemoryGroup | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._shared = shared

    @classmethod
    def connect(
        cls, *, rank: int, size: int, device: torch.device, rendezvous: str, timeout_s: float
    ) -> "TensorParallel":
        """Join the group at `rendezvous` ("file:///..." or "tcp://host:port").

        nccl joins CUDA devices, gloo everything else; CPU ranks of one host then share memory.
        Ranks of one host talk over loopback.
        """
        shared = None
        if size > 1:
            if rendezvous.startswith("file:"):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=rendezvous,
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
            if device.type == "cpu":
                shared = join(rank=rank, size=size, timeout_s=timeout_s)
        return cls(rank=rank, size=size, shared=shared)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over ranks, in place.

        Raises:
            RankError: another rank is gone.
        """
        if self.size > 1:
            recorded(self._all_reduce, x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """(R, D) of every rank joined to (R, size * D), in rank order.

        Raises:
            RankError: another rank is gone.
        """
        return x if self.size == 1 else recorded(self._all_gather, x)

    def _all_reduce(self, x: torch.Tensor) -> None:
        if self._shared is not None and x.dtype in DTYPES and x.is_contiguous():
            self._shared.all_reduce(x)
        else:
            dist.all_reduce(x)

    def _all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if self._shared is not None and self._shared.can_gather(x):
            return self._shared.all_gather(x.contiguous())
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def close(self) -> None:
        """Leave the group; the memory goes with it."""
        self._shared = None
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
