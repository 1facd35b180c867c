"""A C file of an op as Python functions."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from plait.kernels.native.build import NativeBuildError, build
from plait.kernels.native.isa import Isa, chosen_isa
from plait.kernels.native.recording import open_recording

# As `enum dtype` in plait.h.
_DTYPE_CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ARGUMENT_TYPES: "Final[dict[str, type[ctypes._SimpleCData[Any]]]]" = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}


class NativeLibrary:
    """The functions of one C file, built for the chosen instruction set when first asked for.

    Args:
        source: the C file.
        functions: argument types by function name, a letter each: p pointer, i int64, f float,
            d double. Every function returns nothing, or an int64 where the name is in `counting`.
    """

    def __init__(self, source: Path, *, counting: tuple[str, ...] = (), **functions: str) -> None:
        self._source = source
        self._functions = functions
        self._counting = counting
        self._loaded: dict[Isa, Any] = {}

    def load(self) -> Any:  # noqa: ANN401 - the functions of the C file
        """A namespace of the functions.

        Raises:
            NativeBuildError: the file cannot be compiled.
        """
        isa = chosen_isa()
        found = self._loaded.get(isa)
        if found is None:
            path = build(self._source, isa)
            try:
                library = ctypes.CDLL(str(path))
            except OSError as exc:
                raise NativeBuildError(f"{path} cannot be loaded: {exc}") from exc
            found = SimpleNamespace(
                **{name: self._function(library, name) for name in self._functions}
            )
            self._loaded[isa] = found
        recording = open_recording()
        if recording is None:
            return found
        return SimpleNamespace(
            **{name: recording.native(function) for name, function in vars(found).items()}
        )

    def _function(self, library: ctypes.CDLL, name: str) -> Callable[..., int | None]:
        function = library[name]
        function.argtypes = [_ARGUMENT_TYPES[letter] for letter in self._functions[name]]
        function.restype = ctypes.c_int64 if name in self._counting else None
        return function


def dtype_code(dtype: torch.dtype) -> int:
    """The number of `dtype` in plait.h; KeyError for a dtype that C kernels do not take."""
    return _DTYPE_CODES[dtype]


def pointer(tensor: Tensor | None) -> int | None:
    """The address of the first element, NULL for None."""
    return None if tensor is None else tensor.data_ptr()
