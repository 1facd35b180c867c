"""Bamba: Mamba-2 layers with a few attention layers, a gated MLP after each."""

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
from plait.worker.spec import GatedNorm, LayerSpec, Mlp, ModelSpec, TensorPart, WeightNames


def _build(config: Config) -> ModelSpec:
    hidden_dim = config.integer("hidden_size", 4096)
    num_layers = config.integer("num_hidden_layers", 32)
    eps = config.number("rms_norm_eps", 1e-5)
    head_dim = attention_head_dim(config)
    ffn = Mlp(
        intermediate_dim=config.integer("intermediate_size", 14336),
        bias=config.flag("mlp_bias", False),
    )
    recurrent = LayerSpec(
        mixer=mamba2(
            config,
            inner_dim=config.integer("mamba_expand", 2) * hidden_dim,
            norm=GatedNorm(num_groups=config.integer("mamba_n_groups", 1), eps=eps),
            out_bias=config.flag("mamba_proj_bias", False),
        ),
        ffn=ffn,
    )
    attending = LayerSpec(
        mixer=attention(
            config,
            head_dim=head_dim,
            rope=rope(config, head_dim=head_dim, theta=10000.0, partial=0.5),
        ),
        ffn=ffn,
    )
    attention_layers = config.get("attn_layer_indices") or []
    return ModelSpec(
        architecture="BambaForCausalLM",
        vocab_size=config.integer("vocab_size"),
        hidden_dim=hidden_dim,
        layers=tuple(
            attending if index in attention_layers else recurrent for index in range(num_layers)
        ),
        norm_eps=eps,
        max_model_len=config.integer("max_position_embeddings", 262144),
        dtype=model_dtype(config),
        ssm_dtype=ssm_dtype(config),
        tie_embeddings=config.flag("tie_word_embeddings", False),
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
    architecture="BambaForCausalLM",
    model_type="bamba",
    mixers="Mamba-2, attention",
    checkpoints=("Bamba-9B", "Bamba-9B-v2"),
    build=_build,
)
