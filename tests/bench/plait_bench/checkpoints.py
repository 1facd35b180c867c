"""Checkpoints with random weights in the shape of real hybrid models, about 120 M parameters each.

Weights are drawn so that the logits are decided by the prompt and well apart (standard deviation
about 3): engines that run the same model then agree on greedy tokens. Config keys are spelled as
published checkpoints spell them, which every engine reads.
"""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from string import ascii_lowercase
from types import MappingProxyType
from typing import Any, Final

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE: Final = 32000
_HIDDEN: Final = 768
_SEED: Final = 0
_LOGIT_STD: Final = 3.0
_SPECIAL_TOKENS: Final = ("<pad>", "<s>", "</s>")
_PAD, _BOS, _EOS = range(3)
_VERSION: Final = 1  # of what this module writes: another one writes checkpoints anew

_COMMON: Final = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _HIDDEN,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "pad_token_id": _PAD,
    "bos_token_id": _BOS,
    "eos_token_id": _EOS,
}
_ATTENTION: Final = {"num_attention_heads": 12, "num_key_value_heads": 4}
_MAMBA: Final = {
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
}
_GRANITE_LAYERS: Final = 12
_GRANITE_ATTENTION: Final = (4, 10)

CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "granite-h": {
            **_COMMON,
            **_ATTENTION,
            **_MAMBA,
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "num_hidden_layers": _GRANITE_LAYERS,
            "layer_types": [
                "attention" if layer in _GRANITE_ATTENTION else "mamba"
                for layer in range(_GRANITE_LAYERS)
            ],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "intermediate_size": 2048,
            "shared_intermediate_size": 2048,
            "position_embedding_type": "nope",
            "rope_theta": 10000,
            "attention_multiplier": 0.125,
            "embedding_multiplier": 12,
            "residual_multiplier": 0.22,
            "logits_scaling": 8,
            "rms_norm_eps": 1e-05,
            "tie_word_embeddings": True,
        },
        "mamba2": {
            **_COMMON,
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "num_hidden_layers": 24,
            "num_heads": 24,
            "head_dim": 64,
            "n_groups": 1,
            "state_size": 128,
            "conv_kernel": 4,
            "expand": 2,
            "chunk_size": 256,
            "residual_in_fp32": True,
            "rms_norm": True,
            "use_bias": False,
            "use_conv_bias": True,
            "tie_word_embeddings": True,
        },
        "falcon-h1": {
            **_COMMON,
            **_ATTENTION,
            **_MAMBA,
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "num_hidden_layers": 8,
            "head_dim": 64,
            "mamba_d_ssm": 1536,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": False,
            "intermediate_size": 2048,
            "rope_theta": 10000.0,
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 0.9375,
            "key_multiplier": 0.390625,
            "embedding_multiplier": 5.656854249492381,
            "lm_head_multiplier": 0.0390625,
            "mlp_multipliers": [0.8838834764831844, 0.5859375],
            "ssm_in_multiplier": 1.25,
            "ssm_multipliers": [0.35355339, 0.25, 0.35355339, 0.5, 0.35355339],
            "ssm_out_multiplier": 0.23570226039551587,
            "rms_norm_eps": 1e-05,
            # A GGUF of a tied model could not hold two different multipliers.
            "tie_word_embeddings": False,
        },
    }
)


def make_checkpoint(name: str, root: Path) -> Path:
    """The folder of the checkpoint `name` under `root`, written if it is not there yet."""
    folder = root / f"{name}-v{_VERSION}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        _write(CONFIGS[name], part)
        part.rename(folder)
    return folder


def _write(config: Mapping[str, Any], folder: Path) -> None:
    values = {key: value for key, value in config.items() if key != "architectures"}
    model_config = transformers.AutoConfig.for_model(**values)
    model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    randomise(model, logits_multiplier=_logits_multiplier(config))
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    make_tokenizer().save_pretrained(folder)


@torch.no_grad()
def randomise(model: torch.nn.Module, *, logits_multiplier: float) -> None:
    """Draw every parameter anew, from a fixed seed."""
    generator = torch.Generator().manual_seed(_SEED)
    head = model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        if parameter is head:
            std = _LOGIT_STD / math.sqrt(parameter.shape[-1]) / logits_multiplier
            parameter.normal_(0.0, std, generator=generator)
        elif name.endswith("A_log"):
            parameter.uniform_(0.0, math.log(16.0), generator=generator)
        elif name.endswith("dt_bias"):
            parameter.uniform_(-4.0, -1.0, generator=generator)
        elif name.endswith(("norm.weight", "norm_f.weight", "layernorm.weight", ".D")):
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.1, generator=generator)
        elif "conv1d" in name:
            parameter.uniform_(-0.5, 0.5, generator=generator)
        else:
            parameter.normal_(0.0, 1.0 / math.sqrt(parameter.shape[-1]), generator=generator)


def _logits_multiplier(config: Mapping[str, Any]) -> float:
    return config.get("lm_head_multiplier", 1.0) / config.get("logits_scaling", 1.0)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE that merges letter pairs; the other ids are placeholders.

    The cases are given as ids: engines only want a tokenizer of the right size to be there.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(first, second) for first in ascii_lowercase for second in ascii_lowercase]
    tokens = [*_SPECIAL_TOKENS, *alphabet, *(first + second for first, second in merges)]
    tokens += [f"<unused{index}>" for index in range(VOCAB_SIZE - len(tokens))]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = _SPECIAL_TOKENS
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos
    )
