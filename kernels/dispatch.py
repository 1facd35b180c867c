"""Which implementation of an op runs on a device, decided once per process.

PLAIT_KERNEL_BACKEND names one backend for every op; it is read on the first use and never again.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Final

import torch

from plait.kernels.errors import BackendError

BACKEND_VARIABLE: Final = "PLAIT_KERNEL_BACKEND"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One way to implement an op.

    `module` lies in the op's folder; `min_capability` is the oldest CUDA device that runs it.
    """

    name: str
    module: str
    min_capability: tuple[int, int] = (0, 0)

    def runs_on(self, device: torch.device) -> bool:
        """Whether the capability of `device` suffices."""
        if device.type != "cuda" or self.min_capability == (0, 0):
            return True
        return torch.cuda.get_device_capability(device) >= self.min_capability


TORCH: Final = Backend(name="torch", module="torch_impl")
# Never preferred: it is the oracle of the tests, and has to be asked for by name.
REFERENCE: Final = Backend(name="reference", module="reference")

_TORCH_ONLY: Final[Mapping[str, tuple[Backend, ...]]] = {"cpu": (TORCH,), "cuda": (TORCH,)}

# op -> device type -> backends, best first
CANDIDATES: Final[Mapping[str, Mapping[str, tuple[Backend, ...]]]] = {
    "causal_conv1d": _TORCH_ONLY,
    "kv_write": _TORCH_ONLY,
    "moe": _TORCH_ONLY,
    "paged_attention": _TORCH_ONLY,
    "rms_norm": _TORCH_ONLY,
    "rms_norm_gated": _TORCH_ONLY,
    "rotary": _TORCH_ONLY,
    "selective_state_update": _TORCH_ONLY,
    "ssd_scan": _TORCH_ONLY,
}


@cache
def requested_backend() -> str | None:
    """The backend that the environment asks for, or None.

    Raises:
        BackendError: no op has a backend of that name.
    """
    name = os.environ.get(BACKEND_VARIABLE)
    if not name:
        return None
    lists = [backends for by_type in CANDIDATES.values() for backends in by_type.values()]
    known = {REFERENCE.name} | {backend.name for backends in lists for backend in backends}
    if name not in known:
        raise BackendError(
            f"{BACKEND_VARIABLE}: expected one of {', '.join(sorted(known))}, got {name!r}"
        )
    return name


@cache
def implementation(op: str, device: torch.device) -> ModuleType:
    """The module that implements `op` on `device`.

    Raises:
        BackendError: no backend of the op runs there, or not the one the environment asks for.
    """
    return import_module(f"plait.kernels.{op}.{_choose(op, device).module}")


def chosen_backends(device: torch.device) -> dict[str, str]:
    """The name of the backend of every op on `device`, for logs and metrics."""
    return {op: _choose(op, device).name for op in CANDIDATES}


@cache
def _choose(op: str, device: torch.device) -> Backend:
    by_type = CANDIDATES[op]
    if device.type not in by_type:
        raise BackendError(
            f"{op}: expected a device of type {' or '.join(by_type)}, got {device.type}"
        )
    preferred = by_type[device.type]
    runnable = [backend for backend in preferred if backend.runs_on(device)]
    requested = requested_backend()
    if requested is not None:
        runnable = [*runnable, REFERENCE]
        names = [backend.name for backend in runnable]
        if requested not in names:
            raise BackendError(
                f"{op}: {BACKEND_VARIABLE}={requested} does not run on {device}, "
                f"expected one of {', '.join(sorted(names))}"
            )
        return runnable[names.index(requested)]
    if not runnable:
        raise BackendError(f"{op}: no backend runs on {device}, its capability is too low")
    best, chosen = preferred[0], runnable[0]
    if chosen is not best:
        logger.warning("%s: %s cannot run on %s, using %s", op, best.name, device, chosen.name)
    return chosen
