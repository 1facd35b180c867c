"""Recorded calls, done again on other values in the same memory."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from plait.kernels.errors import KernelError
from plait.kernels.linear import linear, pack_weight
from plait.kernels.native import MemoryPool, record, recorded
from plait.kernels.rms_norm import add_rms_norm, rms_norm
from plait.kernels.rms_norm_gated import rms_norm_gated


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def network():
    """C functions, operators of torch, views, and changes in place."""
    generator = seeded(0)
    w_in = pack_weight(torch.randn(96, 32, generator=generator).bfloat16())
    w_out = pack_weight(torch.randn(32, 48, generator=generator).bfloat16())
    norm = torch.rand(32, generator=generator).bfloat16()

    def forward(x: torch.Tensor) -> torch.Tensor:
        residual = x * 2.0
        hidden = rms_norm(residual, norm, eps=1e-5)
        for _ in range(3):
            gate, up = torch.split(linear(hidden, w_in), [48, 48], dim=-1)
            y = rms_norm_gated(up, gate, torch.ones(48), eps=1e-5, group_width=48)
            y.mul_(0.5)
            part = linear(y, w_out) + residual.sum(-1, keepdim=True)
            hidden = add_rms_norm(part, residual, norm, eps=1e-5)
        return hidden

    return forward


def test_replay_computes_what_the_function_computes(native_backend):
    forward, x = network(), torch.empty(4, 32, dtype=torch.bfloat16)
    with torch.inference_mode():
        x.copy_(torch.randn(x.shape, generator=seeded(1)))
        with record(MemoryPool()) as recording:
            y = forward(x)
        assert recording.obstacle is None
        assert torch.equal(y, forward(x))
        for seed in (2, 3, 2):
            x.copy_(torch.randn(x.shape, generator=seeded(seed)))
            recording.replay()
            assert torch.equal(y, forward(x))


def test_recordings_share_memory_and_keep_their_results():
    forward, pool = network(), MemoryPool()
    inputs = [torch.randn(rows, 32, generator=seeded(rows)).bfloat16() for rows in (1, 2, 4)]
    made = []
    with torch.inference_mode():
        for x in inputs:
            with record(pool) as recording:
                made.append((recording, forward(x), x))
        for recording, y, x in reversed(made):
            y.zero_()
            recording.replay()
            assert torch.equal(y, forward(x))


def test_memory_of_what_died_is_used_again():
    pool = MemoryPool()
    first = pool.empty(torch.Size([3, 5]), torch.float32)
    address = first.data_ptr()
    assert address % 64 == 0
    kept = first[1:]
    del first
    gc.collect()
    assert pool.empty(torch.Size([3, 5]), torch.float32).data_ptr() != address
    del kept
    gc.collect()
    again = pool.empty(torch.Size([2, 7]), torch.bfloat16)
    assert again.shape == (2, 7)
    assert again.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(0, 4), (), (1,)])
def test_small_and_empty_shapes(shape):
    assert MemoryPool().empty(torch.Size(shape), torch.int64).shape == shape


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("tolist", lambda x: x * x.tolist()[0]),
        ("item", lambda x: x * x[0].item()),
        ("numpy", lambda x: x * float(x.numpy()[0])),
        ("__bool__", lambda x: x if x[0] > 0 else -x),
        ("nonzero", lambda x: x.nonzero()),
        ("index", lambda x: x[x > 0]),
    ],
)
def test_what_decides_on_values_is_noticed_and_still_done(name, function):
    x = torch.tensor([2.0, 3.0])
    with record(MemoryPool()) as recording:
        y = function(x)
    assert torch.equal(y, function(x))
    assert recording.obstacle is not None


def test_one_call_of_many_operators():
    calls = []

    def doubled(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.tolist())  # no obstacle: the call as a whole is done again
        return x * 2

    x = torch.tensor([1.0])
    with record(MemoryPool()) as recording:
        y = recorded(doubled, x) + 1
    x.fill_(5.0)
    recording.replay()
    assert recording.obstacle is None
    assert y.tolist() == [11.0]
    assert calls == [[1.0], [5.0]]
    assert recorded(doubled, x).tolist() == [10.0]


def test_c_function_that_returns_something_else():
    answers = iter([0, 0, 1])
    with record(MemoryPool()) as recording:
        recording.native(lambda: next(answers))()
    recording.replay()
    with pytest.raises(KernelError, match="returned 0 then, and 1 now"):
        recording.replay()


def test_error_while_recording_ends_it():
    with pytest.raises(ZeroDivisionError), record(MemoryPool()):
        _ = 1 / 0
    with record(MemoryPool()) as recording:
        torch.ones(1)
    recording.replay()
    with record(MemoryPool()), pytest.raises(RuntimeError, match="inside"):
        record(MemoryPool()).__enter__()


def test_other_threads_are_not_recorded():
    forward, x = network(), torch.ones(1, 32, dtype=torch.bfloat16)
    with ThreadPoolExecutor(1) as other, record(MemoryPool()) as recording:
        y = forward(x)
        calls = len(recording._calls)
        assert torch.equal(other.submit(forward, x).result(), y)
        assert len(recording._calls) == calls > 0


def test_constants_made_while_recording_stay():
    made = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = torch.tensor([2.0] * 64)
        made.append(weakref.ref(weight))
        return rms_norm(x, weight, eps=1e-5)

    with torch.no_grad(), record(MemoryPool()) as recording:
        forward(torch.ones(2, 64))
    gc.collect()
    assert made[0]() is not None
    del recording
    gc.collect()
    assert made[0]() is None
