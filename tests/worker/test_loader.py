import json
import struct

import pytest
import torch
from plait_testing.models import TINY_MODELS, save_tiny_model
from safetensors.torch import load_file, save_file

import plait.worker.loader as loader_module
from plait.worker.architectures import load_spec
from plait.worker.errors import WeightsError
from plait.worker.loader import Checkpoint, check_complete, load_parameters
from plait.worker.parameters import FLOAT32, Parameter, Slice, rank_parameters

CPU = torch.device("cpu")
MATRIX = torch.arange(24, dtype=torch.float32).view(6, 4)


def whole(name, tensor, **options):
    part = Slice(tensor=name, stored_shape=tuple(tensor.shape), dim=0, start=0, stop=len(tensor))
    return Parameter(name=name, shape=tuple(tensor.shape), slices=(part,), **options)


def rows(start, stop, *, dim=0, tensor="w", shape=(6, 4)):
    return Slice(tensor=tensor, stored_shape=shape, dim=dim, start=start, stop=stop)


def load(folder, *parameters, dtype="float32", **options):
    return load_parameters(Checkpoint(folder), parameters, dtype=dtype, device=CPU, **options)


@pytest.fixture
def folder(tmp_path):
    save_file({"w": MATRIX, "b": torch.ones(6)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    """Two files and the index that says what is where."""
    save_file({"w": MATRIX}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(6)}, tmp_path / "model-00002-of-00002.safetensors")
    index = {"w": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tmp_path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(TINY_MODELS["falcon-h1"], folder)
    return folder


# What is read


def test_slices_are_joined_along_their_dimension_and_shaped(folder):
    parameter = Parameter(name="p", shape=(2, 2, 4), slices=(rows(1, 2), rows(3, 6)))
    assert torch.equal(load(folder, parameter)["p"], MATRIX[[1, 3, 4, 5]].view(2, 2, 4))
    columns = Parameter(name="p", shape=(6, 2), slices=(rows(0, 1, dim=1), rows(3, 4, dim=1)))
    loaded = load(folder, columns)["p"]
    assert torch.equal(loaded, MATRIX[:, [0, 3]])
    assert loaded.is_contiguous()


def test_an_empty_slice_gives_no_rows(folder):
    """The last ranks of a padded vocabulary hold nothing."""
    parameter = Parameter(name="p", shape=(0, 4), slices=(rows(6, 6),))
    assert load(folder, parameter)["p"].shape == (0, 4)


def test_model_tensors_take_the_asked_dtype_and_float32_ones_keep_theirs(folder):
    parameters = whole("w", MATRIX), whole("b", torch.ones(6), dtype=FLOAT32)
    loaded = load(folder, *parameters, dtype="bfloat16")
    assert (loaded["w"].dtype, loaded["b"].dtype) == (torch.bfloat16, torch.float32)


def test_progress_counts_every_element(folder):
    counts = []
    load(folder, whole("w", MATRIX), whole("b", torch.ones(6)), progress=counts.append)
    assert counts == [24, 6]


def test_a_sharded_checkpoint_is_read_through_its_index(sharded):
    loaded = load(sharded, whole("w", MATRIX), whole("b", torch.ones(6)))
    assert torch.equal(loaded["w"], MATRIX)
    assert torch.equal(loaded["b"], torch.ones(6))
    assert Checkpoint(sharded).tensor_names == {"w", "b"}


def test_files_that_the_index_does_not_name_are_not_read(sharded):
    save_file({"other": MATRIX}, sharded / "consolidated.safetensors")
    assert Checkpoint(sharded).tensor_names == {"w", "b"}


def test_several_files_without_an_index_are_read_together(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    assert Checkpoint(sharded).tensor_names == {"w", "b"}


class CountingFile:
    """A safetensors file that only gives slices, and counts their elements."""

    def __init__(self, file, counts):
        self._file, self._counts = file, counts

    def keys(self):
        return self._file.keys()

    def get_slice(self, name):
        return CountingSlice(self._file.get_slice(name), name, self._counts)


class CountingSlice:
    def __init__(self, stored, name, counts):
        self._stored, self._name, self._counts = stored, name, counts

    def get_shape(self):
        return self._stored.get_shape()

    def __getitem__(self, index):
        tensor = self._stored[index]
        self._counts[self._name] = self._counts.get(self._name, 0) + tensor.numel()
        return tensor


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_reads_its_slices_and_nothing_else(tp, tiny, monkeypatch):
    counts = {}
    safe_open = loader_module.safe_open
    monkeypatch.setattr(
        loader_module,
        "safe_open",
        lambda *args, **kwargs: CountingFile(safe_open(*args, **kwargs), counts),
    )
    spec, stored = load_spec(tiny), load_file(tiny / "model.safetensors")
    for rank in range(tp):
        counts.clear()
        parameters = rank_parameters(spec, tp=tp, rank=rank)
        loaded = load(tiny, *parameters)
        assert {name: tensor.shape for name, tensor in loaded.items()} == {
            parameter.name: parameter.shape for parameter in parameters
        }
        assert sum(counts.values()) == sum(parameter.numel for parameter in parameters)
        for name, count in counts.items():
            if name.endswith(("q_proj.weight", "A_log", "gate_proj.weight", "down_proj.weight")):
                assert count == stored[name].numel() // tp


def test_the_slices_of_all_ranks_make_the_stored_tensor(tiny):
    spec, stored = load_spec(tiny), load_file(tiny / "model.safetensors")
    ranks = [load(tiny, *rank_parameters(spec, tp=4, rank=rank)) for rank in range(4)]
    embedding = torch.cat([loaded["embedding"] for loaded in ranks])
    assert torch.equal(embedding, stored["model.embed_tokens.weight"])
    decay = torch.cat([loaded["layers.0.mamba2.A_log"] for loaded in ranks])
    assert torch.equal(decay, stored["model.layers.0.mamba.A_log"])
    out = torch.cat([loaded["layers.1.attention.o_proj"] for loaded in ranks], dim=1)
    assert torch.equal(out, stored["model.layers.1.self_attn.o_proj.weight"])


# What cannot be read


def test_a_missing_tensor_is_named(folder):
    with pytest.raises(WeightsError, match=f"{folder} has no tensor 'gone.weight'"):
        load(folder, whole("gone.weight", MATRIX))


def test_another_shape_is_named_with_both_shapes(folder):
    with pytest.raises(WeightsError) as caught:
        load(folder, whole("w", torch.ones(6, 5)))
    message = str(caught.value)
    assert str(folder / "model.safetensors") in message
    assert "'w' has shape (6, 4), but config.json makes it (6, 5)" in message


def test_tensors_that_nothing_reads_are_named(folder):
    parameters = [whole("w", MATRIX)]
    with pytest.raises(WeightsError, match=r"does not account for: b$"):
        check_complete(Checkpoint(folder), parameters)
    check_complete(Checkpoint(folder), parameters, tied=["b"])


def test_many_unexpected_tensors_are_counted(tmp_path):
    save_file({f"x{i}": torch.ones(1) for i in range(8)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"x0, x1, x2, x3, x4 and 3 more$"):
        check_complete(Checkpoint(tmp_path), [])


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path):
    names = "model.layers.0.self_attn.rotary_emb.inv_freq", "w"
    save_file({name: MATRIX.clone() for name in names}, tmp_path / "model.safetensors")
    check_complete(Checkpoint(tmp_path), [whole("w", MATRIX)])


@pytest.mark.parametrize("keep", [0, 7, 100, -1], ids="{} bytes".format)
def test_a_truncated_file_is_named(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=f"{path} cannot be read: "):
        Checkpoint(folder)


def test_a_file_that_is_no_safetensors_is_named(folder):
    path = folder / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\n" * 3)
    with pytest.raises(WeightsError, match=f"{path} cannot be read: "):
        Checkpoint(folder)


def test_a_header_that_points_past_the_end_is_refused(folder):
    header = json.dumps({"w": {"dtype": "F32", "shape": [6, 4], "data_offsets": [0, 96]}}).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(50))
    with pytest.raises(WeightsError, match=f"{path} cannot be read: "):
        Checkpoint(folder)


def test_a_folder_without_safetensors_says_so(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match=rf"{tmp_path} holds no \*\.safetensors file"):
        Checkpoint(tmp_path)


def test_a_file_of_the_index_that_is_missing_or_broken_is_named(sharded):
    path = sharded / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    assert load(sharded, whole("w", MATRIX))  # the other file is whole
    with pytest.raises(WeightsError, match=f"{path} cannot be read: "):
        load(sharded, whole("b", torch.ones(6)))
    path.unlink()
    with pytest.raises(WeightsError, match=f"{path} cannot be read: "):
        load(sharded, whole("b", torch.ones(6)))


def test_a_tensor_that_the_index_puts_into_the_wrong_file_is_named(sharded):
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(WeightsError, match=r"00002-of-00002.*cannot be read: .*\bw\b"):
        load(sharded, whole("w", MATRIX))


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": ["w"]}', b"\xff\xfe\x00binary"],
)
def test_an_index_that_is_none_is_named(sharded, content):
    index = sharded / "model.safetensors.index.json"
    index.write_bytes(content)
    with pytest.raises(WeightsError, match=f"{index} is not a safetensors index"):
        Checkpoint(sharded)
