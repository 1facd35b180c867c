"""Tokenizer, config, first weights and checkpoint folder of the demo model."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = (
    "<|pad|>",
    "<|bos|>",
    "<|eos|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
)
PAD, BOS, EOS, USER, ASSISTANT, SYSTEM, END = range(len(SPECIAL_TOKENS))
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCAB_SIZE = 1024
HIDDEN_SIZE = 128
MLP_SIZE = 256
HEAD_DIM = 32
LAYER_TYPES = ("mamba", "mamba", "attention", "mamba", "mamba", "attention")
MAX_LENGTH = 8192


def train_tokenizer(documents: Sequence[str]) -> Tokenizer:
    """Learn a byte-level BPE vocabulary, in which any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    return tokenizer


def model_config() -> GraniteMoeHybridConfig:
    """The shape of the demo model."""
    return GraniteMoeHybridConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=MLP_SIZE,
        shared_intermediate_size=MLP_SIZE,
        num_hidden_layers=len(LAYER_TYPES),
        layer_types=list(LAYER_TYPES),
        num_attention_heads=HIDDEN_SIZE // HEAD_DIM,
        num_key_value_heads=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=2 * HIDDEN_SIZE // HEAD_DIM,
        mamba_d_head=HEAD_DIM,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=64,
        position_embedding_type="nope",
        tie_word_embeddings=True,
        max_position_embeddings=MAX_LENGTH,
        embedding_multiplier=8.0,
        residual_multiplier=0.5,
        attention_multiplier=1 / HEAD_DIM**0.5,
        logits_scaling=2.0,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=[END, EOS],
    )


def new_model() -> GraniteMoeHybridForCausalLM:
    """A model with random weights from torch's global generator, with the usual Mamba-2 start."""
    model = GraniteMoeHybridForCausalLM(model_config())
    with torch.no_grad():
        for mixer in model.modules():
            if hasattr(mixer, "A_log"):
                _start_mixer(mixer)
        model.get_input_embeddings().weight.normal_(std=HIDDEN_SIZE**-0.5)
    return model


def _start_mixer(mixer: Any) -> None:  # noqa: ANN401 - transformers is not typed here
    """Draw time steps log-uniformly from 0.001 to 0.1 and decay rates uniformly from 1 to 16."""
    low, high = math.log(0.001), math.log(0.1)
    dt = torch.exp(torch.rand(mixer.num_heads) * (high - low) + low)
    mixer.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
    mixer.A_log.copy_(torch.empty(mixer.num_heads).uniform_(1, 16).log())
    mixer.conv1d.weight.uniform_(-0.5, 0.5)
    mixer.conv1d.bias.zero_()


def save_checkpoint(model: GraniteMoeHybridForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that transformers loads; `model` is rounded to bf16 in place."""
    model.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[PAD],
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[END],
        additional_special_tokens=[SPECIAL_TOKENS[i] for i in (USER, ASSISTANT, SYSTEM)],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
    ).save_pretrained(folder)

    # transformers 5 writes names that its earlier versions and other readers do not know, and an
    # infinite default that JSON cannot hold.
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = list(LAYER_TYPES)
    config.pop("time_step_limit", None)
    _write_json(folder / "config.json", config)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
