import json
import os
from collections.abc import Callable, Sequence

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when it is first imported

import pytest
import torch
import transformers

from plait.deploy.demo import demo_model_path
from plait.deploy.make_demo_model.evaluate import (
    MAX_NEW_TOKENS,
    Messages,
    recall_prompts,
    repeat_prompts,
    score,
    story_prompts,
)

REMEMBERED = [
    {
        "role": "user",
        "content": "Please remember this. Mia has the red ball. Tom has the blue hat. "
        "Ivy has the green cup.",
    },
    {"role": "assistant", "content": "I will remember."},
    {"role": "user", "content": "What does Tom have?"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def model():
    return transformers.GraniteMoeHybridForCausalLM.from_pretrained(
        demo_model_path(), dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def generate(model, tokenizer) -> Callable[[Sequence[Messages]], list[str]]:
    def reply(messages: Messages) -> str:
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**prompt, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)

    return lambda prompts: [reply(messages) for messages in prompts]


def test_every_file_of_a_checkpoint_is_shipped():
    assert {path.name for path in demo_model_path().iterdir()} == {
        "MODEL_CARD.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_model_card_gives_the_sizes_of_the_shipped_files(model):
    card = (demo_model_path() / "MODEL_CARD.md").read_text()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_bytes = (demo_model_path() / "model.safetensors").stat().st_size
    assert f"{num_parameters / 1e6:.2f} M, bf16, {num_bytes / 1e6:.1f} MB" in card
    config = json.loads((demo_model_path() / "config.json").read_text())
    assert ": " + ", ".join(config["layer_types"]) + ";" in card
    assert f"{config['hidden_size']} / {config['vocab_size']}" in card


def test_weights_are_bf16():
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model_path())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_chat_template_renders_the_form_of_the_training_texts(tokenizer):
    text = tokenizer.apply_chat_template(REMEMBERED, tokenize=False, add_generation_prompt=True)
    assert text == (
        f"<|bos|><|user|>{REMEMBERED[0]['content']}<|end|>"
        "<|assistant|>I will remember.<|end|>"
        "<|user|>What does Tom have?<|end|><|assistant|>"
    )


@pytest.mark.parametrize("text", ["Zürich", "漢字", "🦊\n\ttabs", ""])
def test_any_text_can_be_encoded(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_special_tokens_and_stops_agree(model, tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<|pad|>", "<|bos|>", "<|eos|>", "<|end|>"]) == [
        0,
        1,
        2,
        6,
    ]
    assert model.generation_config.eos_token_id == [6, 2]


def test_samples_of_the_model_card_are_generated(generate):
    story = [{"role": "user", "content": "Tell me a story about Mia and a fox."}]
    recalled, told = generate([REMEMBERED, story])
    assert recalled == "Tom has the blue hat."
    card = (demo_model_path() / "MODEL_CARD.md").read_text()
    start, end = told[:40], told[-40:]
    assert start in card
    assert end in card


# The floors are two below what the shipped weights reach with transformers in fp32: 24 and 25.
@pytest.mark.parametrize(
    ("tasks", "floor"),
    [
        pytest.param(repeat_prompts(10, 25, seed=1), 22, id="repeat-10"),
        pytest.param(recall_prompts(16, 25, seed=1), 23, id="recall-16"),
    ],
)
def test_abilities_are_those_of_the_model_card(generate, tasks, floor):
    assert score(generate, tasks).num_right >= floor


def test_stories_name_both_characters(generate):
    assert score(generate, story_prompts(4, seed=1)).num_right == 4
