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
from plait.kernels.native import NativeBuildError, NativeLibrary, unavailable

BACKEND_VARIABLE: Final = "PLAIT_KERNEL_BACKEND"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One way to implement an op.

    `module` lies in the op's folder; `min_capability` is the oldest CUDA device that runs it. A
    module that wraps C code has a `library`.
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
NATIVE: Final = Backend(name="native", module="native")
# Never preferred: it is the oracle of the tests, and has to be asked for by name.
REFERENCE: Final = Backend(name="reference", module="reference")

_PORTABLE: Final[Mapping[str, tuple[Backend, ...]]] = {"cpu": (TORCH,), "cuda": (TORCH,)}
_WITH_NATIVE: Final[Mapping[str, tuple[Backend, ...]]] = {"cpu": (NATIVE, TORCH), "cuda": (TORCH,)}

# op -> device type -> backends, best first
CANDIDATES: Final[Mapping[str, Mapping[str, tuple[Backend, ...]]]] = {
    "causal_conv1d": _WITH_NATIVE,
    "kv_write": _WITH_NATIVE,
    "linear": _WITH_NATIVE,
    "moe": _WITH_NATIVE,
    "paged_attention": _WITH_NATIVE,
    "rms_norm": _WITH_NATIVE,
    "rms_norm_gated": _WITH_NATIVE,
    "rotary": _WITH_NATIVE,
    "selective_scan": _WITH_NATIVE,
    "selective_state_update": _WITH_NATIVE,
    "silu_and_mul": _WITH_NATIVE,
    "ssd_scan": _WITH_NATIVE,
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
    requested = requested_backend()
    if requested is not None:
        return _requested(op, device, requested, preferred)
    for backend in preferred:
        if _is_usable(op, device, backend):
            return backend
    raise BackendError(f"{op}: no backend runs on {device}, its capability is too low")


def _requested(op: str, device: torch.device, name: str, preferred: tuple[Backend, ...]) -> Backend:
    """The backend called `name`; torch where the op has none of that name on this device."""
    known = {backend.name: backend for backend in (*preferred, REFERENCE)}
    chosen = known.get(name, TORCH)
    if not _is_usable(op, device, chosen):
        names = sorted({*known} - {name})
        raise BackendError(
            f"{op}: {BACKEND_VARIABLE}={name} does not run on {device}, "
            f"expected one of {', '.join(names)}"
        )
    return chosen


def _is_usable(op: str, device: torch.device, backend: Backend) -> bool:
    """Whether `backend` can serve `op` on `device`; if not, a warning says why."""
    if not backend.runs_on(device):
        logger.warning("%s: the %s kernel cannot run on %s", op, backend.name, device)
        return False
    if backend is not NATIVE:
        return True
    if reason := unavailable():
        _warn_without_native(reason)
        return False
    library: NativeLibrary = import_module(f"plait.kernels.{op}.{backend.module}").library
    try:
        library.load()
    except NativeBuildError as exc:
        logger.warning("%s: the slower torch kernel serves, for C code does not build: %s", op, exc)
        return False
    return True


@cache
def _warn_without_native(reason: str) -> None:
    """One line for all ops."""
    logger.warning("CPU KERNELS ARE NOT NATIVE, the several times slower ones serve: %s", reason)
