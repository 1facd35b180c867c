"""Falcon-H1: attention and Mamba-2 side by side in each layer, with a multiplier on every path."""

from plait.worker.architectures.adapter import (
    Adapter,
    attention,
    attention_head_dim,
    mamba2,
    model_dtype,
    rope,
    ssm_dtype,
)
from plait.worker.config import Config
from plait.worker.spec import (
    GatedNorm,
    LayerSpec,
    Mlp,
    ModelSpec,
    Parallel,
    TensorPart,
    WeightNames,
)


def _build(config: Config) -> ModelSpec:
    hidden_dim = config.integer("hidden_size", 4096)
    eps = config.number("rms_norm_eps", 1e-5)
    head_dim = attention_head_dim(config)
    gate_multiplier, down_multiplier = config.numbers("mlp_multipliers", (1.0, 1.0))
    gated_norm = GatedNorm(
        num_groups=config.integer("mamba_n_groups", 1),
        eps=eps,
        before_gate=config.flag("mamba_norm_before_gate", True),
    )
    layer = LayerSpec(
        mixer=Parallel(
            attention=attention(
                config,
                head_dim=head_dim,
                rope=rope(config, head_dim=head_dim, theta=10000.0),
                in_multiplier=config.number("attention_in_multiplier", 1.0),
                key_multiplier=config.number("key_multiplier", 1.0),
                out_multiplier=config.number("attention_out_multiplier", 1.0),
            ),
            mamba2=mamba2(
                config,
                inner_dim=config.integer(
                    "mamba_d_ssm", config.integer("mamba_expand", 2) * hidden_dim
                ),
                norm=gated_norm if config.flag("mamba_rms_norm", False) else None,
                out_bias=config.flag("projectors_bias", False),
                in_multiplier=config.number("ssm_in_multiplier", 1.0),
                section_multipliers=config.numbers("ssm_multipliers", (1.0,) * 5),
                out_multiplier=config.number("ssm_out_multiplier", 1.0),
            ),
        ),
        ffn=Mlp(
            intermediate_dim=config.integer("intermediate_size", 14336),
            bias=config.flag("mlp_bias", False),
            gate_multiplier=gate_multiplier,
            down_multiplier=down_multiplier,
        ),
    )
    return ModelSpec(
        architecture="FalconH1ForCausalLM",
        vocab_size=config.integer("vocab_size"),
        hidden_dim=hidden_dim,
        layers=(layer,) * config.integer("num_hidden_layers", 32),
        norm_eps=eps,
        max_model_len=config.integer("max_position_embeddings", 8192),
        dtype=model_dtype(config),
        ssm_dtype=ssm_dtype(config),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logits_multiplier=config.number("lm_head_multiplier", 1.0),
        eos_token_ids=config.token_ids("eos_token_id"),
        names=WeightNames(
            final_norm="model.final_layernorm.weight",
            ffn_norm="pre_ff_layernorm.weight",
            mlp_gate=TensorPart(name="feed_forward.gate_proj"),
            mlp_up=TensorPart(name="feed_forward.up_proj"),
            mlp_down="feed_forward.down_proj",
        ),
    )


ADAPTER = Adapter(
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    mixers="attention in parallel with Mamba-2",
    checkpoints=("Falcon-H1-0.5B", "Falcon-H1-7B", "Falcon-H1-34B"),
    build=_build,
)
