"""The state cache of one rank: one byte buffer, seen through strided typed views."""

import torch

from plait.worker.plan import ALIGNMENT_BYTES, CachePlan
from plait.worker.tensors import TORCH_DTYPES

# Every bit set is a NaN in float32, bfloat16 and float16 alike.
_POISON_BYTE = 0xFF


class Arena:
    """The pages of a plan as one buffer on `device`.

    Memory is not cleared: kernels take `has_initial_state` and mask unused rows. `poison` fills
    the buffer with NaN, which shows at once where something reads what it should not.
    """

    def __init__(
        self, plan: CachePlan, rank: int, *, device: torch.device, poison: bool = False
    ) -> None:
        self.plan = plan
        self._kinds = {kind.name: kind for kind in plan.layout.kinds}
        raw = torch.empty(plan.arena_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
        start = -raw.data_ptr() % ALIGNMENT_BYTES
        self._bytes = raw[start : start + plan.arena_bytes]
        if poison:
            self._bytes.fill_(_POISON_BYTE)
        self._views = {
            (kind.name, section.layer, section.name): self._view(
                kind.stride_bytes, section.offset_bytes, section.dtype, section.shapes[rank]
            )
            for kind in plan.layout.kinds
            for section in kind.sections
        }

    def view(self, kind: str, layer: int, name: str) -> torch.Tensor:
        """The section `name` of `layer` over all units: (units, *section shape), by stride."""
        return self._views[kind, layer, name]

    def poison_units(self, kind: str, units: tuple[int, ...]) -> None:
        """Fill freed units with NaN."""
        stride = self._kinds[kind].stride_bytes
        for unit in units:
            self._bytes[unit * stride : (unit + 1) * stride].fill_(_POISON_BYTE)

    def _view(
        self, stride_bytes: int, offset_bytes: int, dtype: str, shape: tuple[int, ...]
    ) -> torch.Tensor:
        typed = self._bytes.view(TORCH_DTYPES[dtype])
        size = typed.element_size()
        inner = torch.empty(shape, device="meta").stride()
        return typed.as_strided(
            (self.plan.arena_bytes // stride_bytes, *shape),
            (stride_bytes // size, *inner),
            typed.storage_offset() + offset_bytes // size,
        )
