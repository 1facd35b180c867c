"""What a function computes, recorded once and done again on the same memory.

A step of few tokens is so short that deciding in Python what to call costs a noticeable part of it.
A recording keeps the calls alone: C functions with their arguments, and operators of torch whose
results are copied to where they went the first time.
"""

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from plait.kernels.errors import KernelError

Result = TypeVar("Result")

_ALIGNMENT_BYTES: Final = 64
_GRANULE_BYTES: Final = 4096

# What brings values to the host, where a decision may be taken on them.
_READS: Final = frozenset(
    getattr(Tensor, name)
    for name in ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__")
)
_VALUE_DEPENDENT: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_EMPTY: Final = torch.ops.aten.empty.memory_format
_EMPTY_LIKE: Final = torch.ops.aten.empty_like.default
_LIFT: Final = torch.ops.aten.lift_fresh.default  # what torch.tensor ends with


class MemoryPool:
    """Memory for what is made while recording. It stays; what dies is used again."""

    def __init__(self) -> None:
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = defaultdict(list)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with undefined contents."""
        num_bytes = max(1, shape.numel()) * dtype.itemsize
        size = -(-num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
        free = self._free[size]
        block = free.pop() if free else np.empty(size + _ALIGNMENT_BYTES, np.uint8)
        start = -block.ctypes.data % _ALIGNMENT_BYTES
        memory = block[start : start + num_bytes]
        # The tensor keeps `memory` alive; once it is gone the block is free.
        weakref.finalize(memory, free.append, block)
        return torch.from_numpy(memory).view(dtype)[: shape.numel()].view(shape)


class Recording:
    """The calls that `record` saw, for `replay` on the same inputs in memory.

    `obstacle` says why a replay would not do the same: values were read, and may have decided what
    to call.
    """

    def __init__(self) -> None:
        self.obstacle: str | None = None
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._constants: list[Tensor] = []  # C functions know them by address only

    def replay(self) -> None:
        """Do it all again; results lie where they lay before."""
        for function, arguments in self._calls:
            function(*arguments)

    def native(self, function: Callable[..., int | None]) -> Callable[..., int | None]:
        """`function` of a C library, recorded with whatever arguments it gets."""

        def run(*arguments: object) -> int | None:
            result = function(*arguments)
            if result is None:
                self._calls.append((function, arguments))
            else:
                self._calls.append((_expect, (result, function, arguments)))
            return result

        return run

    def operator(
        self, function: Callable[..., Result], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Result:
        """Run `function`, which gives or changes tensors, and record it."""
        result = function(*arguments, **keywords)
        outputs = _tensors(result)
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((arguments, keywords))}
        if any(out.untyped_storage().data_ptr() not in given for out in outputs):
            self._calls.append((_again, (outputs, function, arguments, keywords)))
        elif not isinstance(function, OpOverload) or function._schema.is_mutable:
            self._calls.append((_in_place, (function, arguments, keywords)))
        elif function is _LIFT:
            self._constants += outputs
        return result


class _Open(threading.local):
    """The recording of this thread, if one is open."""

    recording: Recording | None = None


_open = _Open()


def open_recording() -> Recording | None:
    """The recording that this thread's calls go to."""
    return _open.recording


@contextmanager
def record(pool: MemoryPool) -> Iterator[Recording]:
    """Record what this thread does in the body, which runs as usual.

    Raises:
        RuntimeError: inside of another recording.
    """
    if _open.recording is not None:
        raise RuntimeError("a recording inside of a recording")
    recording = _open.recording = Recording()
    try:
        with _ReadGuard(recording), _TorchRecorder(recording, pool):
            yield recording
    finally:
        _open.recording = None


def recorded(function: Callable[..., Result], *arguments: object) -> Result:
    """Run `function`, which gives or changes a tensor; an open recording keeps it as one call.

    For what is more than an operator or a C function, such as talk with other processes.
    """
    recording = _open.recording
    if recording is None:
        return function(*arguments)
    _open.recording = None
    try:
        return recording.operator(function, arguments, {})
    finally:
        _open.recording = recording


class _ReadGuard(TorchFunctionMode):
    """Notices what reads values past the dispatcher."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func in _READS and _open.recording is self._recording:
            self._recording.obstacle = f"Tensor.{func.__name__} reads values"
        return func(*args, **(kwargs or {}))


class _TorchRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators, and gives memory of the pool to what is made empty."""

    def __init__(self, recording: Recording, pool: MemoryPool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self._pool = pool

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if _open.recording is not self._recording:
            return func(*args, **kwargs)
        if func is _EMPTY:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            return self._pool.empty(torch.Size(args[0]), dtype)
        if func is _EMPTY_LIKE:
            return self._pool.empty(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        if not _VALUE_DEPENDENT.isdisjoint(func.tags):
            self._recording.obstacle = f"{func} depends on values"
        return self._recording.operator(func, args, kwargs)


def _expect(
    result: int, function: Callable[..., int | None], arguments: tuple[object, ...]
) -> None:
    found = function(*arguments)
    if found != result:
        raise KernelError(f"a recorded C function returned {result} then, and {found} now")


def _again(
    outputs: list[Tensor],
    function: Callable[..., object],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> None:
    for output, result in zip(outputs, _tensors(function(*arguments, **keywords)), strict=True):
        if output.data_ptr() != result.data_ptr():
            output.copy_(result)


def _in_place(
    function: Callable[..., object], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    function(*arguments, **keywords)


def _tensors(value: object) -> list[Tensor]:
    """Those in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _tensors(part)]
    return []
