"""Tiny random checkpoints of every architecture, re-randomised so that every part matters.

With transformers' default initialisation a broken scan moves logits by 1e-6 and nothing is
tested; here the logit standard deviation is about 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 101  # does not divide by 2 or 4: the padding is exercised

_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
_COMMON = {"hidden_size": 64, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512}


@dataclass(frozen=True)
class TinyModel:
    """A configuration of an architecture. `multipliers` are (where, field) that a test may drop."""

    name: str
    model_class: str
    config_class: str
    config: Mapping[str, Any]
    multipliers: tuple[str, ...] = field(default=())


TINY_MODELS = {
    model.name: model
    for model in (
        TinyModel(
            name="bamba",
            model_class="BambaForCausalLM",
            config_class="BambaConfig",
            config={
                **_COMMON,
                **_MAMBA,
                **_ATTENTION,
                "intermediate_size": 50,
                "num_hidden_layers": 3,
                "attn_layer_indices": [1],
                "mamba_n_groups": 2,
                "mamba_proj_bias": True,
                "mlp_bias": True,
                "attention_bias": True,
            },
        ),
        TinyModel(
            name="granite-dense",
            model_class="GraniteMoeHybridForCausalLM",
            config_class="GraniteMoeHybridConfig",
            config={
                **_COMMON,
                **_MAMBA,
                **_ATTENTION,
                "shared_intermediate_size": 50,
                "num_local_experts": 0,
                "num_experts_per_tok": 0,
                "num_hidden_layers": 4,
                "layer_types": ["mamba", "attention", "mamba", "mamba"],
                "mamba_n_groups": 1,
                "tie_word_embeddings": True,
                "position_embedding_type": None,
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.7,
                "attention_multiplier": 0.3,
                "logits_scaling": 0.5,
            },
            multipliers=("embedding_multiplier", "logits_multiplier", "residual_multiplier"),
        ),
        TinyModel(
            name="granite-moe",
            model_class="GraniteMoeHybridForCausalLM",
            config_class="GraniteMoeHybridConfig",
            config={
                **_COMMON,
                **_MAMBA,
                **_ATTENTION,
                "intermediate_size": 24,
                "shared_intermediate_size": 32,
                "num_local_experts": 5,
                "num_experts_per_tok": 2,
                "num_hidden_layers": 3,
                "layer_types": ["mamba", "attention", "mamba"],
                "mamba_n_groups": 4,
                "position_embedding_type": "rope",
                "embedding_multiplier": 2.0,
                "residual_multiplier": 0.8,
                "logits_scaling": 1.5,
                "attention_multiplier": 0.25,
            },
            multipliers=("embedding_multiplier", "logits_multiplier", "residual_multiplier"),
        ),
        TinyModel(
            name="falcon-h1",
            model_class="FalconH1ForCausalLM",
            config_class="FalconH1Config",
            config={
                **_COMMON,
                **_MAMBA,
                **_ATTENTION,
                "head_dim": 16,
                "mamba_d_ssm": 128,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "mamba_n_groups": 2,
                "mamba_rms_norm": True,
                "mamba_norm_before_gate": False,
                "projectors_bias": True,
                "attention_bias": True,
                "mlp_bias": True,
                "embedding_multiplier": 2.5,
                "lm_head_multiplier": 0.7,
                "mlp_multipliers": [0.8, 0.6],
                "key_multiplier": 0.4,
                "attention_in_multiplier": 1.3,
                "attention_out_multiplier": 0.9,
                "ssm_in_multiplier": 1.25,
                "ssm_out_multiplier": 0.6,
                "ssm_multipliers": [0.35, 0.5, 0.4, 0.6, 0.7],
            },
            multipliers=(
                "embedding_multiplier",
                "logits_multiplier",
                "key_multiplier",
                "attention.in_multiplier",
                "attention.out_multiplier",
                "mamba2.in_multiplier",
                "mamba2.out_multiplier",
                "section_multipliers",
                "gate_multiplier",
                "down_multiplier",
            ),
        ),
        TinyModel(
            name="falcon-h1-plain",
            model_class="FalconH1ForCausalLM",
            config_class="FalconH1Config",
            config={
                **_COMMON,
                **_MAMBA,
                **_ATTENTION,
                "mamba_n_heads": 12,
                "mamba_d_head": 8,
                "head_dim": 8,
                "mamba_d_ssm": 96,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "mamba_n_groups": 3,
                "num_attention_heads": 12,
                "num_key_value_heads": 3,
                "mamba_rms_norm": False,
            },
        ),
        TinyModel(
            name="falcon-h1-norm-first",
            model_class="FalconH1ForCausalLM",
            config_class="FalconH1Config",
            config={
                **_COMMON,
                **_MAMBA,
                **_ATTENTION,
                "mamba_n_heads": 12,
                "mamba_d_head": 8,
                "head_dim": 8,
                "mamba_d_ssm": 96,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "mamba_n_groups": 3,
                "mamba_rms_norm": True,
                "mamba_norm_before_gate": True,
                "time_step_limit": [0.05, 0.6],
            },
        ),
        TinyModel(
            name="mamba2",
            model_class="Mamba2ForCausalLM",
            config_class="Mamba2Config",
            config={
                "hidden_size": 64,
                "vocab_size": VOCAB_SIZE,
                "num_heads": 8,
                "head_dim": 16,
                "state_size": 16,
                "n_groups": 2,
                "num_hidden_layers": 3,
                "chunk_size": 64,
                "use_bias": True,
            },
        ),
    )
}


def save_tiny_model(model: TinyModel, folder: Path, *, seed: int = 0) -> torch.nn.Module:
    """Write a re-randomised checkpoint to `folder`; gives the transformers model, in float32."""
    config = getattr(transformers, model.config_class)(**model.config)
    oracle = getattr(transformers, model.model_class)(config).eval().float()
    randomise(oracle, seed=seed)
    oracle.save_pretrained(folder)
    return oracle


@torch.no_grad()
def randomise(module: torch.nn.Module, *, seed: int) -> None:
    """Give every parameter values at which an error anywhere shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.uniform_(-2.0, 1.0, generator=generator)
        elif name.endswith(("norm.weight", "layernorm.weight", "norm_f.weight", ".D")):
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.2, generator=generator)
        else:
            parameter.normal_(0.0, 1.0 / math.sqrt(parameter.shape[-1]), generator=generator)


@torch.inference_mode()
def oracle_logits(oracle: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """(L, V) logits of one full forward pass without a cache."""
    return oracle(torch.tensor([token_ids]), use_cache=False).logits[0].float()
