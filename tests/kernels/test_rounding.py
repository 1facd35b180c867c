"""Stochastic rounding of states, in torch and in C."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait.kernels.native import NativeLibrary, dtype_code, library
from plait.kernels.rounding import StochasticRounding, round_stochastically, store_state
from plait.kernels.selective_state_update import selective_state_update
from tests.kernels.conftest import NATIVE_VARIANTS

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
WORDS = 2**32
HALVES = [BF16, F16]
# Of a standard deviation: that a sound generator fails once in a million comparisons.
SIGMAS = 5

FUNCTIONS = NativeLibrary(
    Path(__file__).with_name("state_functions.c"),
    bits="iiiipi",
    round_given="pppii",
    store_first="ppiiii",
)


@pytest.fixture(params=list(dict.fromkeys(isa for isa, _ in NATIVE_VARIANTS)), ids=lambda i: i.name)
def functions(request, monkeypatch):
    """The C functions for one instruction set."""
    monkeypatch.setattr(library, "chosen_isa", lambda: request.param)
    return FUNCTIONS.load()


@pytest.fixture
def rounding(make):
    return StochasticRounding(
        seeds=make.int64(1, 2, -1, 1 << 40), positions=make.int64(0, 1, 5, 1 << 33), layer=3
    )


def random_bits(rounding, count, row=0, **options):
    return rounding.bits(row, torch.Size([count]), **options)


def edge_values():
    """Zeros, subnormals, ties, the largest values of both formats, infinities, NaN; both signs."""
    words = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F800001, 0x3F808000, 0x3F808001, 0x3F801000]
    words += [0x33000000, 0x33000001, 0x33800000, 0x337FFFFF, 0x387FC000, 0x387FFFFF, 0x38800000]
    words += [0x477FE000, 0x477FE001, 0x477FEFFF, 0x477FF000, 0x47800000]
    words += [0x7F7F0000, 0x7F7F0001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]
    words = torch.tensor(words)
    return torch.cat([words, words - 2**31]).to(torch.int32).view(F32)


def many_values(make, count):
    """Values of every exponent, ordinary ones, and those of the subnormals of float16."""
    words = torch.randint(-(2**31), 2**31, (count,), generator=make._generator)
    small = make.normal(count) * 2.0**-16
    return torch.cat([words.to(torch.int32).view(F32), make.normal(count), small])


def padded(values):
    """Filled up to a multiple of every number of lanes."""
    return torch.cat([values, values.new_zeros(-len(values) % 16)])


# ---- the random bits ----------------------------------------------------------------------------


def test_bits_come_from_seed_position_layer_and_element_alone(rounding, make):
    base = random_bits(rounding, 64)
    assert torch.equal(base, random_bits(rounding, 64))
    assert ((base >= 0) & (base < WORDS)).all()
    other_row = replace(rounding, seeds=make.int64(9, 1), positions=make.int64(9, 0))
    assert torch.equal(random_bits(other_row, 64, row=1), base)
    later = replace(rounding, positions=rounding.positions + 7)
    assert torch.equal(random_bits(rounding, 64, offset=7), random_bits(later, 64))
    part = replace(rounding, first_element=20)
    assert torch.equal(random_bits(part, 44), base[20:])
    assert torch.equal(rounding.bits(0, torch.Size([8, 2, 4])).flatten(), base)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda r: replace(r, seeds=r.seeds + 1), id="seed"),
        pytest.param(lambda r: replace(r, seeds=r.seeds + (1 << 32)), id="high seed"),
        pytest.param(lambda r: replace(r, positions=r.positions + 1), id="position"),
        pytest.param(lambda r: replace(r, layer=r.layer + 1), id="layer"),
        pytest.param(lambda r: replace(r, first_element=1), id="element"),
        pytest.param(lambda r: replace(r, first_element=64), id="row of elements"),
        pytest.param(
            lambda r: replace(r, positions=r.positions + 1, layer=r.layer - 1), id="two of them"
        ),
    ],
)
@pytest.mark.parametrize("row", [0, 2, 3])
def test_neighbours_are_not_correlated(rounding, change, row):
    count = 1 << 16
    mine, theirs = random_bits(rounding, count, row), random_bits(change(rounding), count, row)
    same = torch.stack([((mine ^ theirs) >> bit & 1).double().mean() for bit in range(32)])
    assert (same - 0.5).abs().max() < SIGMAS * 0.5 / math.sqrt(count)
    high = torch.stack([(mine >> 16).double(), (theirs >> 16).double()])
    assert torch.corrcoef(high)[0, 1].abs() < SIGMAS / math.sqrt(count)


@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_bits_are_uniform(rounding, row):
    count = 1 << 18
    bits = random_bits(rounding, count, row)
    ones = torch.stack([(bits >> bit & 1).double().mean() for bit in range(32)])
    assert (ones - 0.5).abs().max() < SIGMAS * 0.5 / math.sqrt(count)
    counts = torch.bincount(bits >> 24, minlength=256).double()
    chi_square = ((counts - count / 256) ** 2 / (count / 256)).sum()
    assert abs(chi_square - 255) < SIGMAS * math.sqrt(2 * 255)


def test_one_element_over_positions_is_uniform(make):
    """What the drift of a state element depends on."""
    count = 4096
    over_time = torch.cat(
        [
            StochasticRounding(
                seeds=make.int64(5), positions=make.int64(position), layer=0, first_element=77
            ).bits(0, torch.Size([1]))
            for position in range(count)
        ]
    )
    ones = torch.stack([(over_time >> bit & 1).double().mean() for bit in range(16, 32)])
    assert (ones - 0.5).abs().max() < SIGMAS * 0.5 / math.sqrt(count)
    high = (over_time >> 16).double()
    assert torch.corrcoef(torch.stack([high[1:], high[:-1]]))[0, 1].abs() < SIGMAS / count**0.5


# ---- rounding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [1.0, 1.001, -1.0005, 3.14159, 300.1, 2e-5, -5.96e-8, 1e-8])
def test_the_mean_is_exact(rounding, dtype, value):
    count = 1 << 18
    x = torch.full((count,), value)
    rounded = round_stochastically(x, dtype, random_bits(rounding, count)).double()
    exact = x[0].double()
    values = rounded.unique()
    assert len(values) <= 2
    if len(values) == 1:
        # The one neighbour is the value itself, or so near that the other is one in thousands.
        gap = torch.finfo(dtype).eps * max(abs(value), torch.finfo(dtype).tiny)
        assert abs(values[0] - exact) <= gap * 1e-4
        return
    below, above = values
    assert below < exact < above
    share = (exact - below) / (above - below)
    deviation = (above - below) * (share * (1 - share) / count).sqrt()
    # Random bits below 2^-13 of a gap there are none.
    assert abs(rounded.mean() - exact) < SIGMAS * deviation + 2.0**-13 * (above - below)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_result_is_a_neighbour(rounding, make, dtype):
    x = torch.cat([edge_values(), many_values(make, 1 << 14)])
    rounded = round_stochastically(x, dtype, random_bits(rounding, len(x)))
    largest, nearest = torch.finfo(dtype).max, x.to(dtype)
    assert torch.equal(rounded.isnan(), x.isnan())
    beyond = (x.abs() > largest) | ~x.isfinite()
    assert torch.equal(rounded[beyond].nan_to_num(), nearest[beyond].nan_to_num())
    x, rounded, nearest = x[~beyond], rounded[~beyond], nearest[~beyond]
    assert torch.equal(rounded.signbit(), x.signbit())
    assert torch.equal(rounded[nearest == x], nearest[nearest == x])
    # The neighbours are the nearest and the next one on the other side of x.
    words = nearest.view(torch.int16)
    away = torch.where(nearest.float().abs() < x.abs(), words + 1, words - 1).view(dtype)
    assert ((rounded == nearest) | (rounded == away)).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_least_and_greatest_bits_round_down_and_up(make, dtype):
    x = make.normal(1000).abs() + 1e-3
    down = round_stochastically(x, dtype, torch.zeros(1000, dtype=torch.int64))
    up = round_stochastically(x, dtype, torch.full((1000,), WORDS - 1))
    assert (down.float() <= x).all()
    assert (up.float() >= x).all()
    assert (up > down).all()
    assert torch.equal(up.view(torch.int16), down.view(torch.int16) + 1)


def test_wide_dtypes_are_not_rounded(rounding, make):
    x = make.normal(64)
    assert torch.equal(round_stochastically(x, F32, random_bits(rounding, 64)), x)
    assert torch.equal(round_stochastically(x, F64, random_bits(rounding, 64)), x.double())


def test_store_state(rounding, make):
    h = make.normal(4, 16)
    for dtype in (F32, F64):
        target = torch.empty(4, 16, dtype=dtype)
        store_state(target, h, rounding, 1, offset=2)
        assert torch.equal(target, h.to(dtype))
    target = torch.empty(4, 16, dtype=BF16)
    store_state(target, h, None, 1)
    assert torch.equal(target, h.bfloat16())
    store_state(target, h, rounding, 1, offset=2)
    assert torch.equal(target, round_stochastically(h, BF16, rounding.bits(1, h.shape, offset=2)))


# ---- the C twin ---------------------------------------------------------------------------------


@pytest.mark.parametrize("first_element", [0, 20, (1 << 32) - 8, 1 << 40])
def test_bits_in_c_are_those_in_torch(functions, rounding, first_element):
    here = replace(rounding, first_element=first_element)
    for row in range(4):
        ours = torch.zeros(64, dtype=torch.int32)
        functions.bits(
            int(here.seeds[row]),
            int(here.positions[row]) + 3,
            here.layer,
            first_element,
            ours.data_ptr(),
            64,
        )
        assert torch.equal(ours.long() % WORDS, random_bits(here, 64, row, offset=3))


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_in_c_is_that_in_torch(functions, rounding, make, dtype):
    x = padded(torch.cat([edge_values(), edge_values(), many_values(make, 1 << 14)]))
    bits = random_bits(rounding, len(x))
    bits[: len(edge_values())] = WORDS - 1
    expected = round_stochastically(x, dtype, bits)
    ours = torch.zeros(len(x), dtype=dtype)
    words = bits.to(torch.int32)
    functions.round_given(
        x.data_ptr(), words.data_ptr(), ours.data_ptr(), dtype_code(dtype), len(x)
    )
    assert torch.equal(ours.isnan(), x.isnan())
    numbers = ~x.isnan()
    assert torch.equal(ours[numbers].view(torch.int16), expected[numbers].view(torch.int16))


@pytest.mark.parametrize("dtype", [F32, *HALVES])
def test_a_part_of_a_vector_is_that_part_alone(functions, make, dtype):
    x = make.normal(16)
    whole, some = torch.zeros(2, 16, dtype=dtype)
    functions.store_first(x.data_ptr(), whole.data_ptr(), dtype_code(dtype), 16, 99, 5)
    functions.store_first(x.data_ptr(), some.data_ptr(), dtype_code(dtype), 3, 99, 5)
    assert torch.equal(some[:3], whole[:3])
    assert (some[3:] == 0).all()


# ---- states -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("backend")
def test_small_increments_add_up(make):
    """To nearest, a state stays where it is once an increment is less than half a gap."""
    num_steps, shape = 400, (1, 4, 8, 16)
    ones = make.normal(1, 4, 8).fill_(1.0)
    rates, inputs = torch.zeros(4), make.uniform(1, 1, 16, low=5e-4, high=2e-3)
    start = make.uniform(*shape, low=1.0, high=1.9)
    exact = start + num_steps * inputs[:, :, None]
    errors = {}
    for is_stochastic in (False, True):
        state = torch.cat([start, start]).bfloat16()
        before = state[1].double()
        for position in range(num_steps):
            rounding = StochasticRounding(
                seeds=make.int64(11), positions=make.int64(position), layer=2
            )
            selective_state_update(
                ones,
                ones[:, :, 0],
                rates,
                inputs,
                inputs,
                state,
                read_slots=make.int64(1),
                write_slots=make.int64(1),
                dt_softplus=False,
                rounding=rounding if is_stochastic else None,
            )
        drift = state[1].double() - before
        errors[is_stochastic] = (drift - (exact[0] - start[0]).double()).mean().abs()
    assert errors[True] < 0.05 * errors[False]
