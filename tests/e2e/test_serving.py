"""A running server through the clients that people use."""

import httpx
import openai
import pytest
import torch
import transformers
from plait_testing.greedy import Comparison, GreedyRun
from plait_testing.server import Server

from plait.deploy.demo import demo_model_path
from plait.deploy.make_demo_model import evaluate
from plait.worker.architectures import load_spec
from tests.cluster.malformed import Malformed, malformed_requests

pytestmark = pytest.mark.ray

MODEL = "demo_model"
STORY = [{"role": "user", "content": "Tell me a story about Mia and a fox."}]
READY_LIMIT_S = 40.0


@pytest.fixture(scope="module")
def client(server: Server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_is_ready_in_time(server, record_property):
    record_property("ready_s", server.ready_s)
    print(f"ready after {server.ready_s:.1f} s")
    assert server.ready_s < READY_LIMIT_S


def test_lists_its_model(client):
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.models.retrieve("nobody")


def test_chat_is_readable_and_the_same_when_streamed(client):
    whole = client.chat.completions.create(model=MODEL, messages=STORY, temperature=0)
    (choice,) = whole.choices
    assert choice.finish_reason == "stop"
    assert choice.message.role == "assistant"
    assert choice.message.content.startswith("Once upon a time there was a brave fox.")
    assert choice.message.content.endswith("The end.")
    usage = whole.usage
    assert usage.prompt_tokens > 5
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=STORY,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == choice.message.content
    assert len([text for text in texts if text]) > 0.8 * usage.completion_tokens  # token by token
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage == usage


def test_completion_stop_logprobs_and_choices(client):
    ask = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 24}
    plain = client.completions.create(**ask)
    text = plain.choices[0].text
    assert plain.choices[0].finish_reason == "length"
    assert plain.usage.completion_tokens == 24

    word = text.split()[4]
    stopped = client.completions.create(**ask, stop=[word])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == text[: text.index(word)]

    scored = client.completions.create(**ask, logprobs=3).choices[0]
    assert scored.text == text == "".join(scored.logprobs.tokens)
    assert all(value <= 0 for value in scored.logprobs.token_logprobs)
    for token, value, top in zip(
        scored.logprobs.tokens,
        scored.logprobs.token_logprobs,
        scored.logprobs.top_logprobs,
        strict=True,
    ):
        assert len(top) <= 3
        assert top[token] == value == max(top.values())

    twice = client.completions.create(**ask | {"temperature": 1.0, "seed": 7}, n=2)
    assert [choice.index for choice in twice.choices] == [0, 1]
    assert twice.choices[0].text != twice.choices[1].text
    assert twice.usage.completion_tokens == 48
    again = client.completions.create(**ask | {"temperature": 1.0, "seed": 7}, n=2)
    assert [c.text for c in again.choices] == [c.text for c in twice.choices]


def test_chat_logprobs(client):
    reply = client.chat.completions.create(
        model=MODEL, messages=STORY, temperature=0, max_tokens=8, logprobs=True, top_logprobs=2
    ).choices[0]
    assert "".join(entry.token for entry in reply.logprobs.content) == reply.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in reply.logprobs.content)


def test_greedy_chat_equals_transformers(client):
    """Near-ties aside: both run in bf16, and round in other places."""
    tasks = [
        *evaluate.fact_prompts(2, seed=21),
        *evaluate.repeat_prompts(10, 2, seed=22),
        *evaluate.recall_prompts(16, 2, seed=23),
        *evaluate.story_prompts(1, seed=24),
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_path())
    oracle = transformers.GraniteMoeHybridForCausalLM.from_pretrained(
        demo_model_path(), dtype=torch.bfloat16
    ).eval()
    comparison = Comparison()
    for task in tasks:
        choice = client.chat.completions.create(
            model=MODEL,
            messages=task.messages,
            temperature=0,
            max_tokens=64,
            logprobs=True,
        ).choices[0]
        expected = _transformers_run(oracle, tokenizer, task.messages)
        comparison.add(expected, [entry.token for entry in choice.logprobs.content])
    comparison.check()


@torch.inference_mode()
def _transformers_run(oracle, tokenizer, messages) -> GreedyRun:
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    drawn = oracle.generate(
        **prompt,
        do_sample=False,
        max_new_tokens=64,
        return_dict_in_generate=True,
        output_logits=True,
    )
    ids = drawn.sequences[0, prompt["input_ids"].shape[1] :].tolist()
    gaps = []
    for logits in drawn.logits:
        top = logits[0].float().log_softmax(-1).topk(2).values
        gaps.append(float(top[0] - top[1]))
    has_ended = tokenizer.decode(ids[-1:], skip_special_tokens=True) == ""
    if has_ended:
        ids, gaps = ids[:-1], gaps[:-1]
    return GreedyRun(
        tokens=tuple(tokenizer.decode([token]) for token in ids),
        gaps=tuple(gaps),
        finish_reason="stop" if has_ended else "length",
    )


def test_plan_is_the_formula(server):
    """fp32 SSM state beside bf16 convolution state and KV, all by default."""
    plan = httpx.get(f"{server.url}/plan").json()
    layout = plan["layout"]
    assert layout["dtypes"] == {"kv": "bfloat16", "conv": "bfloat16", "ssm": "float32"}
    config = transformers.AutoConfig.from_pretrained(demo_model_path())
    tp, block = 2, layout["block_size"]
    assert (layout["tensor_parallel_size"], block) == (tp, 16)

    def aligned(num_bytes: int) -> int:
        return -(-num_bytes // 256) * 256

    heads = config.mamba_n_heads // tp
    channels = heads * config.mamba_d_head + 2 * config.mamba_n_groups * config.mamba_d_state
    conv = aligned((config.mamba_d_conv - 1) * channels * 2)
    ssm = aligned(heads * config.mamba_d_head * config.mamba_d_state * 4)
    kv_heads = config.num_key_value_heads // tp
    keys = aligned(block * kv_heads * (config.hidden_size // config.num_attention_heads) * 2)
    spec = load_spec(demo_model_path())
    num_attention = sum(layer.attention is not None for layer in spec.layers)
    num_recurrent = len(spec.layers) - num_attention
    assert (num_recurrent, num_attention) == (4, 2)

    kinds = {kind["name"]: kind for kind in layout["kinds"]}
    state, kv = kinds["state"], kinds["kv"]
    assert state["unit_bytes"] == num_recurrent * (conv + ssm)
    assert kv["unit_bytes"] == num_attention * 2 * keys
    by_name = {
        (section["name"], section["dtype"], section["num_bytes"])
        for kind in (state, kv)
        for section in kind["sections"]
    }
    assert by_name == {
        ("conv", "bfloat16", conv),
        ("ssm", "float32", ssm),
        ("k", "bfloat16", keys),
        ("v", "bfloat16", keys),
    }
    for kind in (state, kv):
        assert kind["stride_bytes"] * kind["units_per_page"] == layout["page_bytes"]
        assert kind["unit_bytes"] <= kind["stride_bytes"] <= kind["unit_bytes"] * 1.01
    metrics = server.metrics()
    assert metrics("plait_usable_pages") == plan["num_pages"] - 1
    assert metrics("plait_page_bytes") == layout["page_bytes"]
    info = {"layout_digest": plan["layout_digest"][:12], "ssm_dtype": "float32"}
    assert metrics("plait_plan_info", **info) == 1


def test_malformed_requests_get_their_4xx_and_the_next_one_works(server):
    context = httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    vocab_size = load_spec(demo_model_path()).vocab_size
    cases = malformed_requests(model=MODEL, context=context, vocab_size=vocab_size)
    assert len(cases) >= 30
    good = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 2}
    wrong: list[str] = []
    with server.client() as http:
        expected = http.post("/v1/completions", json=good).json()["choices"]
        for case in cases:
            wrong += _complaints(http, case)
            next_one = http.post("/v1/completions", json=good)
            if next_one.status_code != 200 or next_one.json()["choices"] != expected:
                wrong.append(f"after {case.name}: {next_one.text}")
    assert wrong == []
    assert server.metrics()("plait_http_requests_total", status="500") == 0


def _complaints(http: httpx.Client, case: Malformed) -> list[str]:
    reply = http.post(case.path, content=case.body, headers={"Content-Type": "application/json"})
    if reply.status_code != case.status:
        return [f"{case.name}: {reply.status_code} {reply.text}"]
    error = reply.json().get("error")
    if not isinstance(error, dict) or error.keys() != {"message", "type", "param", "code"}:
        return [f"{case.name}: {reply.text}"]
    if case.param is not None and error["param"] != case.param:
        return [f"{case.name}: blames {error['param']}"]
    if case.code is not None and error["code"] != case.code:
        return [f"{case.name}: code {error['code']}"]
    return [] if error["message"] else [f"{case.name}: no message"]
