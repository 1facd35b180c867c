"""Granite 4.0 H: Mamba-2 layers with a few attention layers, a dense or a routed ffn after each."""

from plait.worker.architectures.adapter import (
    Adapter,
    attention,
    attention_head_dim,
    layer_kinds,
    mamba2,
    model_dtype,
    rope,
    ssm_dtype,
)
from plait.worker.config import Config
from plait.worker.spec import (
    Ffn,
    GatedNorm,
    LayerSpec,
    Mixer,
    Mlp,
    ModelSpec,
    Moe,
    TensorPart,
    WeightNames,
)


def _ffn(config: Config) -> Ffn:
    shared = Mlp(intermediate_dim=config.integer("shared_intermediate_size", 1024))
    num_experts = config.integer("num_local_experts", 8)
    if num_experts == 0:
        return shared
    return Moe(
        num_experts=num_experts,
        experts_per_token=config.integer("num_experts_per_tok", 2),
        intermediate_dim=config.integer("intermediate_size"),
        shared=shared,
    )


def _build(config: Config) -> ModelSpec:
    hidden_dim = config.integer("hidden_size", 4096)
    num_layers = config.integer("num_hidden_layers", 32)
    eps = config.number("rms_norm_eps", 1e-6)
    head_dim = attention_head_dim(config)
    positions = config.choice("position_embedding_type", ("rope", "nope", None))
    mixers: dict[str, Mixer] = {
        "attention": attention(
            config,
            head_dim=head_dim,
            scale=config.number("attention_multiplier", 1.0),
            rope=rope(config, head_dim=head_dim, theta=10000.0) if positions == "rope" else None,
        ),
        "mamba2": mamba2(
            config,
            inner_dim=config.integer("mamba_expand", 2) * hidden_dim,
            norm=GatedNorm(num_groups=config.integer("mamba_n_groups", 1), eps=eps),
            out_bias=config.flag("mamba_proj_bias", False),
        ),
    }
    ffn = _ffn(config)
    kinds_key = "layer_types" if "layer_types" in config else "layers_block_type"
    return ModelSpec(
        architecture="GraniteMoeHybridForCausalLM",
        vocab_size=config.integer("vocab_size"),
        hidden_dim=hidden_dim,
        layers=tuple(
            LayerSpec(
                mixer=mixers[kind],
                ffn=ffn,
                residual_multiplier=config.number("residual_multiplier", 1.0),
            )
            for kind in layer_kinds(config, kinds_key, num_layers)
        ),
        norm_eps=eps,
        max_model_len=config.integer("max_position_embeddings", 2048),
        dtype=model_dtype(config),
        ssm_dtype=ssm_dtype(config),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logits_multiplier=1.0 / config.number("logits_scaling", 1.0),
        eos_token_ids=config.token_ids("eos_token_id"),
        names=WeightNames(
            mlp_gate=TensorPart(name="shared_mlp.input_linear", index=0, count=2),
            mlp_up=TensorPart(name="shared_mlp.input_linear", index=1, count=2),
            mlp_down="shared_mlp.output_linear",
        ),
    )


ADAPTER = Adapter(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    mixers="Mamba-2, attention; dense or MoE",
    checkpoints=("Granite-4.0-H-Micro", "Granite-4.0-H-Tiny", "Granite-4.0-H-Small"),
    build=_build,
)
