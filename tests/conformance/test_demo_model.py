"""The demo model through `LLM`: the tokens of transformers, and the cache bytes of the plan."""

import random

import pytest
import torch
import transformers
from plait_testing.logits import clear_rows
from plait_testing.models import oracle_logits

from plait.cluster.llm import LLM, SamplingParams
from plait.deploy.demo import demo_model_path
from plait.deploy.make_demo_model import corpus, evaluate
from plait.worker.plan import STATE

NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
FLOAT32 = {"device": "cpu", "dtype": "float32", "cache_memory": "64MiB", "max_num_seqs": 20}


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    return transformers.GraniteMoeHybridForCausalLM.from_pretrained(
        demo_model_path(), dtype=torch.float32
    ).eval()


def prompts(llm: LLM) -> list[list[int]]:
    """20 prompts of all the sorts that the model was trained on, and plain openings of stories."""
    tasks = [
        *evaluate.fact_prompts(4, seed=11),
        *evaluate.repeat_prompts(10, 4, seed=12),
        *evaluate.recall_prompts(16, 4, seed=13),
        *evaluate.story_question_prompts(4, seed=14),
        *evaluate.story_prompts(2, seed=15),
    ]
    rng = random.Random(16)
    stories = [corpus.story(rng).text for _ in range(2)]
    return [
        *(llm.tokenizer.apply_chat_template(task.messages) for task in tasks),
        *(llm.tokenizer.encode(text[: len(text) // 2]) for text in stories),
    ]


@pytest.mark.parametrize("size", [1, 2], ids="tp{}".format)
def test_greedy_tokens_equal_transformers(size, oracle):
    """Up to the first near-tie of a prompt, from where on any continuation is as right."""
    with LLM(
        str(demo_model_path()), tensor_parallel_size=size, threads_per_rank=1, **FLOAT32
    ) as llm:
        asked = prompts(llm)
        results = llm.generate(asked, GREEDY)
    assert len(results) == 20
    num_compared = 0
    for prompt, result in zip(asked, results, strict=True):
        drawn = result.outputs[0].token_ids
        assert len(drawn) == NUM_TOKENS
        logits = oracle_logits(oracle, prompt + drawn)[len(prompt) - 1 : -1]
        clear = clear_rows(logits)
        until = NUM_TOKENS if clear.all() else int(clear.int().argmin())
        assert drawn[:until] == logits.argmax(-1)[:until].tolist()
        num_compared += until
    assert num_compared >= 0.95 * len(results) * NUM_TOKENS


# By hand, for 4 Mamba-2 layers of 8 heads x 32 with state 32, one group and a convolution of 4,
# and 2 attention layers of 2 KV heads x 32, blocks of 16 tokens. Sections start at 256 bytes.
CONV_BYTES = {1: 2048, 2: 1280}  # 3 x (256 + 2 x 32) x 2 = 1920; half of x: 3 x (128 + 64) x 2
SSM_BYTES = {1: 8 * 32 * 32 * 4, 2: 4 * 32 * 32 * 4}
KV_BYTES = {1: 2 * 16 * 32 * 2, 2: 1 * 16 * 32 * 2}


@pytest.mark.parametrize("size", [1, 2], ids="tp{}".format)
def test_float32_state_lies_beside_bfloat16_cache_with_exact_bytes(size):
    with LLM(
        str(demo_model_path()),
        tensor_parallel_size=size,
        dtype="bfloat16",
        mamba_ssm_cache_dtype="float32",
        device="cpu",
        cache_memory="16MiB",
        threads_per_rank=1,
    ) as llm:
        plan = llm.model.plan
    state = plan.layout.state_kind
    (kv,) = plan.layout.kv_kinds
    assert [(s.layer, s.name, s.dtype, s.num_bytes) for s in state.sections] == [
        entry
        for layer in (0, 1, 3, 4)
        for entry in (
            (layer, "conv", "bfloat16", CONV_BYTES[size]),
            (layer, "ssm", "float32", SSM_BYTES[size]),
        )
    ]
    assert [(s.layer, s.name, s.dtype, s.num_bytes) for s in kv.sections] == [
        (layer, name, "bfloat16", KV_BYTES[size]) for layer in (2, 5) for name in ("k", "v")
    ]
    assert state.unit_bytes == 4 * (CONV_BYTES[size] + SSM_BYTES[size])
    assert kv.unit_bytes == 4 * KV_BYTES[size]
    assert state.name == STATE
    assert plan.arena_bytes == plan.num_pages * plan.layout.page_bytes <= 16 << 20
