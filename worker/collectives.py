"""What the ranks of one model do together: sum partial results, gather shards."""

import datetime
import os

import torch
import torch.distributed as dist


class TensorParallel:
    """This rank's place among `size` ranks, and the collectives between them.

    With one rank nothing is initialised and every collective is the identity.
    """

    def __init__(self, *, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def connect(
        cls, *, rank: int, size: int, device: torch.device, rendezvous: str, timeout_s: float
    ) -> "TensorParallel":
        """Join the group at `rendezvous` ("file:///..." or "tcp://host:port").

        nccl joins CUDA devices, gloo everything else. Ranks of one host talk over loopback.
        """
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
        return cls(rank=rank, size=size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """(R, D) of every rank joined to (R, size * D), in rank order."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
