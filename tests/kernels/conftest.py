"""Inputs, cache memory and the tolerance rule of the kernel tests."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.kernels import dispatch
from plait.kernels.dtypes import accumulate_dtype
from plait.kernels.native import ISAS, Isa, library

Inputs = dict[str, Any]
Results = dict[str, Tensor]

# The stated floor of every comparison: units in the last place of the largest expected value, in
# the dtype that sums are kept in.
FLOOR_ULPS = 2
# Nothing is wider than float64: there the expected value is itself a float64 sum, off by as much.
FLOAT64_FLOOR_ULPS = 32


@pytest.fixture(autouse=True)
def nan_filled_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN, so that reading it shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    return torch.device(request.param)


# What AVX-512 runs, lowered to two registers of AVX2 each: all but its intrinsics is the same code.
WIDE_ON_AVX2 = Isa(
    name="lanes16",
    compiler_flags=("-march=x86-64-v3", "-DLANES=16", "-Wno-psabi"),
    cpu_flags=ISAS["avx2"].cpu_flags,
)
NATIVE_VARIANTS = [
    (isa, threads) for isa in (*ISAS.values(), WIDE_ON_AVX2) if isa.runs_here for threads in (1, 2)
]


def _name(variant: tuple[Isa, int] | None) -> str:
    return "torch" if variant is None else f"native-{variant[0].name}-{variant[1]}"


@pytest.fixture(params=[None, *NATIVE_VARIANTS], ids=_name)
def backend(request, monkeypatch, device) -> Iterator[str]:
    """Run the test once per backend; C code for every instruction set, with one and two threads."""
    with _use(request.param, monkeypatch, device) as name:
        yield name


@pytest.fixture(params=NATIVE_VARIANTS, ids=_name)
def native_backend(request, monkeypatch, device) -> Iterator[str]:
    """As `backend`, for what C code alone promises."""
    with _use(request.param, monkeypatch, device) as name:
        yield name


@contextlib.contextmanager
def _use(
    variant: tuple[Isa, int] | None, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> Iterator[str]:
    before = torch.get_num_threads()
    if variant is None:
        monkeypatch.setenv(dispatch.BACKEND_VARIABLE, "torch")
    elif device.type != "cpu":
        pytest.skip("C kernels run on the CPU")
    else:
        isa, threads = variant
        monkeypatch.setenv(dispatch.BACKEND_VARIABLE, "native")
        monkeypatch.setattr(library, "chosen_isa", lambda: isa)
        torch.set_num_threads(threads)
    forget_choices()
    yield "torch" if variant is None else "native"
    forget_choices()
    torch.set_num_threads(before)


def forget_choices() -> None:
    """Make dispatch choose anew."""
    for function in (dispatch.requested_backend, dispatch.implementation, dispatch._choose):
        function.cache_clear()


class Maker:
    """Random tensors and poisoned cache memory on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, dtype)

    def uniform(self, *shape: int, low: float, high: float) -> Tensor:
        values = torch.rand(shape, generator=self._generator) * (high - low) + low
        return values.to(self.device)

    def int32(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def int64(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def units(self, num_units: int, *parts: tuple[Sequence[int], torch.dtype]) -> list[Tensor]:
        """One view (num_units, *shape) for every part, all of the same byte buffer.

        A unit holds its parts one after the other, 16-byte aligned, with a gap at its end. Every
        byte is 0xFF, which is NaN in any float dtype.
        """
        offsets, unit_bytes = [], 0
        for shape, dtype in parts:
            offsets.append(unit_bytes)
            unit_bytes += -(-math.prod(shape) * dtype.itemsize // 16) * 16
        unit_bytes += 16
        buffer = torch.full((num_units, unit_bytes), 0xFF, dtype=torch.uint8, device=self.device)
        views = []
        for (shape, dtype), offset in zip(parts, offsets, strict=True):
            part = buffer[:, offset : offset + math.prod(shape) * dtype.itemsize]
            views.append(part.view(dtype).unflatten(1, tuple(shape)))
        return views

    def state(self, rows: Inputs, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """State slots, NaN but for those that a row of `rows` starts from."""
        num_slots = int(torch.cat([rows["read_slots"], rows["write_slots"]]).max()) + 2
        other = ((3,), torch.float32)
        _, state, _ = self.units(num_slots, other, (shape, dtype), other)
        valid = rows.get("has_initial_state", torch.ones_like(rows["read_slots"]) > 0)
        for slot in rows["read_slots"][valid].tolist():
            if slot != 0:
                state[slot] = self.normal(*shape, dtype=dtype)
        return state

    def packed_rows(self, lengths: Sequence[int]) -> Inputs:
        """Rows that read slots 1.. and write slots after those; every second one starts fresh."""
        num_rows = len(lengths)
        return {
            "cu_seqlens": self.int32(0, *torch.tensor(lengths).cumsum(0).tolist()),
            "read_slots": self.int64(*range(1, num_rows + 1)),
            "write_slots": self.int64(*range(num_rows + 1, 2 * num_rows + 1)),
            "has_initial_state": self.int64(*range(num_rows)) % 2 == 0,
        }

    def decode_rows(self, num_rows: int) -> Inputs:
        """Rows of one token that read slots 1.. and write slots after those."""
        return {
            "read_slots": self.int64(*range(1, num_rows + 1)),
            "write_slots": self.int64(*range(num_rows + 1, 2 * num_rows + 1)),
        }


@pytest.fixture
def make(device: torch.device) -> Maker:
    return Maker(device)


def _copy_memory(view: Tensor) -> Tensor:
    """The same view of a copy of all the memory behind it."""
    storage = view.untyped_storage().clone()
    empty = torch.empty(0, dtype=view.dtype, device=view.device)
    return empty.set_(storage, view.storage_offset(), view.size(), view.stride())


def _run(op: Callable[..., Tensor | None], inputs: Inputs, mutated: Sequence[str]) -> Results:
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    copies = {name: _copy_memory(value) for name, value in tensors.items()}
    out = op(**(inputs | copies))
    for name in tensors.keys() - set(mutated):
        copy = copies.pop(name)
        assert torch.equal(copy.nan_to_num(), tensors[name].nan_to_num()), f"{name} was changed"
    return copies if out is None else copies | {"out": out}


@pytest.fixture
def run() -> Callable[..., Results]:
    """`run(op, inputs, mutated)`: call with copies of all tensors, return the `mutated` ones too.

    All other tensors have to be as before.
    """
    return _run


def _widen(inputs: Inputs) -> Inputs:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def _error(value: Tensor, exact: Tensor) -> float:
    assert torch.equal(value.isnan(), exact.isnan()), "NaN in other places than expected"
    difference = (value.double() - exact).abs().nan_to_num()
    return difference.max().item() if difference.numel() else 0.0


@pytest.fixture
def match() -> Callable[..., Results]:
    """`match(op, plain, inputs, mutated)`: run `op` and hold it to the tolerance rule.

    The error against `plain` in float64 is at most twice that of `plain` in the given dtypes,
    plus the floor.
    """

    def match(
        op: Callable[..., Tensor | None],
        plain: Callable[..., Tensor | None],
        inputs: Inputs,
        mutated: Sequence[str] = (),
    ) -> Results:
        ours = _run(op, inputs, mutated)
        plains = _run(plain, inputs, mutated)
        exacts = _run(plain, _widen(inputs), mutated)
        for name, exact in exacts.items():
            assert ours[name].dtype == plains[name].dtype
            assert ours[name].shape == exact.shape
            largest = exact.abs().nan_to_num().max().item() if exact.numel() else 0.0
            sum_dtype = accumulate_dtype(ours[name].dtype)
            ulps = FLOAT64_FLOOR_ULPS if sum_dtype == torch.float64 else FLOOR_ULPS
            floor = ulps * torch.finfo(sum_dtype).eps * largest
            error, allowed = _error(ours[name], exact), 2 * _error(plains[name], exact) + floor
            assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
        return ours

    return match
