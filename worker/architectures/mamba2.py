"""Mamba-2 language models: no attention and no feed-forward layers."""

from plait.worker.architectures.adapter import Adapter, model_dtype, ssm_dtype
from plait.worker.config import Config
from plait.worker.spec import GatedNorm, LayerSpec, Mamba2, ModelSpec, WeightNames


def _build(config: Config) -> ModelSpec:
    config.choice("hidden_act", ("silu",), "silu")
    hidden_dim = config.integer("hidden_size", 4096)
    num_heads, head_dim = config.integer("num_heads", 128), config.integer("head_dim", 64)
    inner_dim = config.integer("expand", 2) * hidden_dim
    if num_heads * head_dim != inner_dim:
        raise config.error("num_heads", num_heads, f"{inner_dim} inner channels over head_dim")
    num_groups = config.integer("n_groups", 8)
    if num_heads % num_groups:
        raise config.error("n_groups", num_groups, f"a divisor of {num_heads} heads")
    eps = config.number("layer_norm_epsilon", 1e-5)
    bias = config.flag("use_bias", False)
    low, high = config.numbers("time_step_limit", (0.0, float("inf")))
    layer = LayerSpec(
        mixer=Mamba2(
            num_heads=num_heads,
            head_dim=head_dim,
            state_dim=config.integer("state_size", 128),
            num_groups=num_groups,
            conv_width=config.integer("conv_kernel", 4),
            chunk_size=config.integer("chunk_size", 256),
            conv_bias=config.flag("use_conv_bias", True),
            in_bias=bias,
            out_bias=bias,
            dt_limit=(low, high),
            norm=GatedNorm(num_groups=num_groups, eps=eps),
        )
    )
    return ModelSpec(
        architecture="Mamba2ForCausalLM",
        vocab_size=config.integer("vocab_size"),
        hidden_dim=hidden_dim,
        layers=(layer,) * config.integer("num_hidden_layers", 64),
        norm_eps=eps,
        max_model_len=config.integer("max_position_embeddings", 1 << 20),
        dtype=model_dtype(config),
        ssm_dtype=ssm_dtype(config),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        residual_in_fp32=config.flag("residual_in_fp32", True),
        eos_token_ids=config.token_ids("eos_token_id"),
        names=WeightNames(
            embedding="backbone.embeddings.weight",
            final_norm="backbone.norm_f.weight",
            layer="backbone.layers.{i}.",
            input_norm="norm.weight",
            mamba2="mixer.",
        ),
    )


ADAPTER = Adapter(
    architecture="Mamba2ForCausalLM",
    model_type="mamba2",
    mixers="Mamba-2 (attention-free)",
    checkpoints=("Mamba-Codestral-7B", "mamba2-2.7b (converted to transformers' format)"),
    build=_build,
)
