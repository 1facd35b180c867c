import json
import math
from pathlib import Path

import pytest

from plait.worker.architectures import ADAPTERS, load_spec
from plait.worker.errors import ConfigError, ShardError
from plait.worker.parameters import rank_parameters
from plait.worker.spec import Attention, Mamba2, Mlp, Moe, Parallel, check_tp_size, valid_tp_sizes

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def changed(tmp_path, name, **values):
    """The folder of a copy of the public config `name` with `values` in place; None removes."""
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | values
    kept = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("bamba-9b", 9_780_235_392),
        ("granite-4.0-h-small", 32_207_337_984),
        ("granite-4.0-h-micro", 3_191_396_096),
        ("granite-4.0-h-tiny", 6_939_037_248),
        ("falcon-h1-7b", 7_585_648_736),
        ("falcon-h1-0.5b", 521_411_104),
        ("mamba-codestral-7b", 7_285_403_648),
    ],
)
def test_parameters_add_up_to_the_published_count(name, published):
    spec = load_spec(CONFIGS / f"{name}.json")
    assert sum(p.numel for p in rank_parameters(spec, tp=1, rank=0)) == published


def test_bamba_reads_its_public_config():
    spec = load_spec(CONFIGS / "bamba-9b.json")
    attending = [i for i, layer in enumerate(spec.layers) if layer.attention is not None]
    assert (spec.architecture, len(spec.layers), attending) == (
        "BambaForCausalLM",
        32,
        [9, 18, 27],
    )
    mixer = spec.layers[9].mixer
    assert isinstance(mixer, Attention)
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (32, 8, 128)
    assert (mixer.rope.theta, mixer.rope.rotary_dim, mixer.scale) == (10000.0, 64, 128**-0.5)
    recurrent = spec.layers[0].mixer
    assert isinstance(recurrent, Mamba2)
    assert (recurrent.num_heads, recurrent.head_dim, recurrent.state_dim) == (128, 64, 128)
    assert spec.layers[0].ffn == Mlp(intermediate_dim=14336)
    assert not spec.tie_embeddings
    assert spec.eos_token_ids == (128001,)


def test_granite_small_has_routed_experts_and_tied_embeddings():
    spec = load_spec(CONFIGS / "granite-4.0-h-small.json")
    assert spec.tie_embeddings
    assert spec.layers[0].ffn == Moe(
        num_experts=72,
        experts_per_token=10,
        intermediate_dim=768,
        shared=Mlp(intermediate_dim=1536),
    )


def test_granite_micro_is_dense_without_positions_and_has_multipliers():
    spec = load_spec(CONFIGS / "granite-4.0-h-micro.json")
    mixer = spec.layers[5].mixer
    assert isinstance(mixer, Attention)
    assert (mixer.rope, mixer.scale) == (None, 0.015625)
    assert spec.layers[0].ffn == Mlp(intermediate_dim=8192)
    assert (spec.embedding_multiplier, spec.logits_multiplier) == (12.0, 0.125)
    assert spec.layers[0].residual_multiplier == 0.22
    assert (spec.names.mlp_gate.index, spec.names.mlp_up.index) == (0, 1)


def test_falcon_h1_has_both_mixers_in_each_layer():
    spec = load_spec(CONFIGS / "falcon-h1-0.5b.json")
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Parallel)
    assert mixer.attention.rope.theta == 1e11
    assert mixer.mamba2.inner_dim == 1536
    assert mixer.mamba2.norm is None
    assert mixer.mamba2.section_multipliers[3] == 0.5
    assert mixer.mamba2.chunk_size == 128
    assert spec.layers[0].ffn.down_multiplier == 0.5859375


def test_falcon_h1_7b_lists_the_tp_sizes_that_work():
    spec = load_spec(CONFIGS / "falcon-h1-7b.json")
    assert valid_tp_sizes(spec) == (1, 2, 3, 4, 6, 12)
    with pytest.raises(ShardError, match=r"1, 2, 3, 4, 6, 12\.$"):
        check_tp_size(spec, 8)


def test_mamba2_has_no_attention_and_no_ffn():
    spec = load_spec(CONFIGS / "mamba-codestral-7b.json")
    assert not spec.has_attention
    assert {layer.ffn for layer in spec.layers} == {None}
    assert spec.layers[0].mamba2.norm.num_groups == 8
    assert spec.residual_in_fp32
    assert valid_tp_sizes(spec) == (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize("spelling", ['{"__float__": "Infinity"}', "Infinity"])
def test_infinity_is_read_in_both_spellings(tmp_path, spelling):
    folder = changed(tmp_path, "bamba-9b", time_step_limit="LIMIT")
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"LIMIT"', f"[0.001, {spelling}]"))
    spec = load_spec(folder)
    assert spec.layers[0].mamba2.dt_limit == (0.001, math.inf)


def test_both_spellings_of_layer_types_give_the_same_model(tmp_path):
    config = json.loads((CONFIGS / "granite-4.0-h-micro.json").read_text())
    respelt = {"mamba": "linear_attention", "attention": "full_attention"}
    kinds = [respelt[kind] for kind in config["layer_types"]]
    folder = changed(tmp_path, "granite-4.0-h-micro", layer_types=None, layers_block_type=kinds)
    assert load_spec(folder) == load_spec(CONFIGS / "granite-4.0-h-micro.json")


def test_a_model_type_stands_in_for_a_missing_architecture(tmp_path):
    spec = load_spec(changed(tmp_path, "bamba-9b", architectures=None))
    assert spec == load_spec(CONFIGS / "bamba-9b.json")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        pytest.param(
            "granite-4.0-h-micro",
            {"layer_types": ["mamba"] * 39 + ["rwkv"]},
            "'layer_types' is 'rwkv'; expected layer types out of mamba, mamba2, linear_attention, "
            "attention, full_attention",
            id="layer-type",
        ),
        pytest.param(
            "granite-4.0-h-micro",
            {"layer_types": ["mamba"] * 39},
            "expected a list of 40 layer types",
            id="too-few-layer-types",
        ),
        pytest.param(
            "bamba-9b",
            {"hidden_act": "gelu"},
            "'hidden_act' is 'gelu'; expected one of 'silu'",
            id="activation",
        ),
        pytest.param(
            "mamba-codestral-7b",
            {"hidden_act": "relu"},
            "'hidden_act' is 'relu'; expected one of 'silu'",
            id="activation-mamba2",
        ),
        pytest.param(
            "falcon-h1-7b",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "'rope_type' is 'yarn'; expected 'default'",
            id="rope-kind",
        ),
        pytest.param(
            "bamba-9b",
            {"architectures": ["RwkvForCausalLM"]},
            "names RwkvForCausalLM, which Plait does not serve. Known: BambaForCausalLM, "
            "FalconH1ForCausalLM, GraniteMoeHybridForCausalLM, Mamba2ForCausalLM.",
            id="architecture",
        ),
        pytest.param(
            "bamba-9b",
            {"architectures": None, "model_type": "rwkv"},
            "names rwkv, which Plait does not serve",
            id="model-type",
        ),
        pytest.param(
            "bamba-9b",
            {"quantization_config": {"quant_method": "fp8"}},
            "weights quantized with fp8 are not supported; use an unquantized checkpoint",
            id="quantization",
        ),
        pytest.param(
            "granite-4.0-h-micro",
            {"position_embedding_type": "alibi"},
            "'position_embedding_type' is 'alibi'; expected one of 'rope', 'nope'",
            id="positions",
        ),
        pytest.param("bamba-9b", {"vocab_size": None}, "'vocab_size' is missing", id="missing-key"),
        pytest.param(
            "bamba-9b",
            {"hidden_size": "4096"},
            "'hidden_size' is '4096'; expected an integer",
            id="wrong-type",
        ),
        pytest.param(
            "bamba-9b",
            {"mamba_n_heads": 96},
            "'mamba_d_head' is 64; expected 96 heads that make 8192",
            id="heads-that-do-not-add-up",
        ),
        pytest.param(
            "bamba-9b",
            {"num_key_value_heads": 5},
            "'num_key_value_heads' is 5; expected a divisor of 32",
            id="kv-heads",
        ),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(tmp_path, name, values, message):
    with pytest.raises(ConfigError) as caught:
        load_spec(changed(tmp_path, name, **values))
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)


def test_a_missing_or_broken_config_says_where(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json at .*: give a checkpoint folder"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object, not list"):
        load_spec(tmp_path)


def test_every_adapter_has_a_public_config_here():
    built = {load_spec(file).architecture for file in CONFIGS.glob("*.json")}
    assert built >= {adapter.architecture for adapter in ADAPTERS}
