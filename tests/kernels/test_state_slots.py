"""The rules of state memory, for every op that keeps a state in slots."""

from functools import partial

import pytest
import torch

from plait.kernels.causal_conv1d import causal_conv1d_prefill, causal_conv1d_update
from plait.kernels.causal_conv1d import reference as conv
from plait.kernels.selective_state_update import reference as update
from plait.kernels.selective_state_update import selective_state_update
from plait.kernels.ssd_scan import reference as scan
from plait.kernels.ssd_scan import ssd_scan

LENGTHS = (3, 2, 70)
CHANNELS, WIDTH = 6, 4
HEADS, GROUPS, HEAD_DIM, STATE_DIM = 4, 2, 3, 5


def conv_inputs(make, num_tokens):
    return {
        "x": make.normal(num_tokens, CHANNELS),
        "weight": make.normal(CHANNELS, WIDTH),
        "bias": make.normal(CHANNELS),
    }


def ssm_inputs(make, num_tokens):
    return {
        "x": make.normal(num_tokens, HEADS, HEAD_DIM),
        "dt": make.normal(num_tokens, HEADS),
        "A": -make.uniform(HEADS, low=0.1, high=4.0),
        "B": make.normal(num_tokens, GROUPS, STATE_DIM),
        "C": make.normal(num_tokens, GROUPS, STATE_DIM),
    }


CONV_STATE, SSM_STATE = (WIDTH - 1, CHANNELS), (HEADS, HEAD_DIM, STATE_DIM)
PREFILLS = [
    pytest.param(causal_conv1d_prefill, conv_inputs, CONV_STATE, id="causal_conv1d_prefill"),
    pytest.param(ssd_scan, ssm_inputs, SSM_STATE, id="ssd_scan"),
    pytest.param(conv.causal_conv1d_prefill, conv_inputs, CONV_STATE, id="reference conv prefill"),
    pytest.param(scan.ssd_scan, ssm_inputs, SSM_STATE, id="reference ssd_scan"),
]
UPDATES = [
    pytest.param(causal_conv1d_update, conv_inputs, CONV_STATE, id="causal_conv1d_update"),
    pytest.param(selective_state_update, ssm_inputs, SSM_STATE, id="selective_state_update"),
    pytest.param(conv.causal_conv1d_update, conv_inputs, CONV_STATE, id="reference conv update"),
    pytest.param(update.selective_state_update, ssm_inputs, SSM_STATE, id="reference ssm update"),
]


def prefill_inputs(make, tensors, shape, state_dtype=torch.float32):
    rows = make.packed_rows(LENGTHS)
    state = make.state(rows, shape, state_dtype)
    return rows | tensors(make, sum(LENGTHS)) | {"state": state}


def decode_inputs(make, tensors, shape, state_dtype=torch.float32):
    rows = make.decode_rows(len(LENGTHS))
    return rows | tensors(make, len(LENGTHS)) | {"state": make.state(rows, shape, state_dtype)}


def memory(view):
    """All the bytes behind a view, one row of bytes for each slot."""
    whole = torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())
    return whole.view(len(view), -1)


def check_only_written_slots_changed(inputs, results, written):
    """Compares whole slots, hence also that the parts beside the state in a slot are kept."""
    before, after = memory(inputs["state"]), memory(results["state"])
    changed = (before != after).any(dim=1).nonzero().squeeze(1).tolist()
    assert changed == written
    # The state in a slot starts 16 bytes in, after another part, and another part follows it.
    first = inputs["state"].storage_offset() * inputs["state"].element_size()
    last = first + inputs["state"][0].numel() * inputs["state"].element_size()
    assert first == 16
    assert torch.equal(before[:, :first], after[:, :first])
    assert torch.equal(before[:, last:], after[:, last:])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("op", "tensors", "shape", "build"),
    [
        *(pytest.param(*case.values, prefill_inputs, id=case.id) for case in PREFILLS),
        *(pytest.param(*case.values, decode_inputs, id=case.id) for case in UPDATES),
    ],
)
class TestEveryOp:
    def test_writes_the_write_slots_only(self, make, run, op, tensors, shape, build, state_dtype):
        inputs = build(make, tensors, shape, state_dtype)
        results = run(op, inputs, ["state"])
        check_only_written_slots_changed(inputs, results, inputs["write_slots"].tolist())
        assert results["out"].isfinite().all()
        assert results["state"][inputs["write_slots"]].isfinite().all()

    def test_null_row_is_zeros_and_leaves_no_trace(
        self, make, run, op, tensors, shape, build, state_dtype
    ):
        inputs = build(make, tensors, shape, state_dtype)
        live = run(op, inputs, ["state"])
        bounds = inputs.get("cu_seqlens", torch.arange(4)).tolist()
        null = slice(bounds[1], bounds[2])
        inputs["x"][null] = torch.nan
        inputs["write_slots"][1] = 0
        results = run(op, inputs, ["state"])
        assert (results["out"][null] == 0).all()
        written = [slot for slot in inputs["write_slots"].tolist() if slot]
        check_only_written_slots_changed(inputs, results, written)
        live["out"][null] = 0
        torch.testing.assert_close(results["out"], live["out"])

    def test_read_slot_0_starts_from_zeros(self, make, run, op, tensors, shape, build, state_dtype):
        inputs = build(make, tensors, shape, state_dtype)
        inputs["state"][inputs["read_slots"]] = 0
        expected = run(op, inputs, ["state"])
        inputs["read_slots"] = torch.zeros_like(inputs["read_slots"])
        results = run(op, inputs, ["state"])
        torch.testing.assert_close(results["out"], expected["out"])
        slots = inputs["write_slots"]
        torch.testing.assert_close(results["state"][slots], expected["state"][slots])

    def test_only_null_rows(self, make, run, op, tensors, shape, build, state_dtype):
        inputs = build(make, tensors, shape, state_dtype)
        inputs["write_slots"] = torch.zeros_like(inputs["write_slots"])
        results = run(op, inputs, ["state"])
        assert (results["out"] == 0).all()
        check_only_written_slots_changed(inputs, results, [])

    def test_out_has_the_dtype_and_shape_of_x(
        self, make, run, op, tensors, shape, build, state_dtype
    ):
        inputs = build(make, tensors, shape, state_dtype)
        inputs["x"] = inputs["x"].bfloat16()
        out = run(op, inputs, ["state"])["out"]
        assert (out.dtype, out.shape) == (torch.bfloat16, inputs["x"].shape)


@pytest.mark.parametrize(("op", "tensors", "shape"), PREFILLS)
class TestEveryPrefill:
    def test_fresh_row_ignores_its_read_slot(self, make, run, op, tensors, shape):
        inputs = prefill_inputs(make, tensors, shape)
        inputs["state"][2] = make.normal(*shape)  # the row 1 has no initial state
        inputs["write_slots"][1] = 2
        clean = run(op, inputs, ["state"])
        inputs["state"][2] = torch.nan
        poisoned = run(op, inputs, ["state"])
        torch.testing.assert_close(poisoned["out"], clean["out"], rtol=0, atol=0)
        torch.testing.assert_close(poisoned["state"][2], clean["state"][2], rtol=0, atol=0)
        assert poisoned["state"][2].isfinite().all()

    def test_tokens_past_the_last_row_are_zeros(self, make, run, op, tensors, shape):
        inputs = prefill_inputs(make, tensors, shape)
        inputs["cu_seqlens"][3] = 40
        inputs["x"][40:] = torch.nan
        out = run(op, inputs, ["state"])["out"]
        assert (out[40:] == 0).all()
        assert out[:40].isfinite().all()

    def test_empty_row_keeps_its_state(self, make, run, op, tensors, shape):
        inputs = prefill_inputs(make, tensors, shape)
        inputs["cu_seqlens"] = make.int32(0, 0, 0, 75)
        state = run(op, inputs, ["state"])["state"]
        torch.testing.assert_close(state[4], inputs["state"][1], rtol=0, atol=0)
        assert (state[5] == 0).all()

    def test_no_rows(self, make, run, op, tensors, shape):
        inputs = prefill_inputs(make, tensors, shape) | tensors(make, 0)
        inputs |= {"cu_seqlens": make.int32(0), "has_initial_state": make.int64() > 0}
        inputs |= {"read_slots": make.int64(), "write_slots": make.int64()}
        results = run(op, inputs, ["state"])
        assert results["out"].shape == inputs["x"].shape
        check_only_written_slots_changed(inputs, results, [])


@pytest.mark.parametrize(("op", "tensors", "shape"), UPDATES)
def test_row_of_a_batch_equals_a_batch_of_one(make, run, op, tensors, shape):
    inputs = decode_inputs(make, tensors, shape)
    together = run(op, inputs, ["state"])
    weights = ("weight", "bias", "A", "state")
    pick = partial(torch.narrow, dim=0, start=1, length=1)
    one = {name: value if name in weights else pick(value) for name, value in inputs.items()}
    alone = run(op, one, ["state"])
    torch.testing.assert_close(together["out"][1:2], alone["out"])
    torch.testing.assert_close(together["state"][5], alone["state"][5])
