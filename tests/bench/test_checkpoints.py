"""The shapes of the benchmark's models, without writing their weights."""

import json
from pathlib import Path

import pytest
from plait_bench.cases import CASES
from plait_bench.checkpoints import CONFIGS, VOCAB_SIZE, make_tokenizer
from plait_bench.models import BenchModel
from plait_bench.roofline import Limits


@pytest.fixture(params=tuple(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> BenchModel:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[request.param]))
    return BenchModel.load(request.param, tmp_path)


def test_models_have_about_120_million_parameters(model: BenchModel):
    assert 110e6 < model.num_parameters < 135e6


def test_the_operators_read_every_matrix(model: BenchModel):
    limits = Limits(
        read_bytes=1.0, copy_bytes=1.0, vector_flops=1.0, gemm_flops={"float32": {1: 1}}
    )
    result = model.case_result(CASES["decode-1"], limits)
    tied = model.spec.tie_embeddings
    matrices = model.num_parameters - (0 if tied else VOCAB_SIZE * model.spec.hidden_dim)
    # Norms, convolutions and biases are what is missing.
    assert 0.99 * 2 * matrices < result.weights_read < 2 * matrices


def test_the_tokenizer_names_every_id_and_keeps_text():
    tokenizer = make_tokenizer()
    assert len(tokenizer) == VOCAB_SIZE
    ids = tokenizer.encode("Hello, wörld", add_special_tokens=False)
    assert len(ids) < len("Hello, wörld".encode())  # some pairs are merged
    assert tokenizer.decode(ids) == "Hello, wörld"
