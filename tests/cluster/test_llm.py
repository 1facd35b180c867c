"""Offline generation with the demo model."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
import transformers
from plait_testing.models import oracle_logits

from plait.cluster.engine import Engine
from plait.cluster.errors import ContextLengthError, ParameterError, RequestError
from plait.cluster.llm import LLM, SamplingParams
from plait.deploy.demo import demo_model_path
from plait.worker.errors import ConfigError, PlanError
from plait.worker.protocol import Allocate

MODEL = str(demo_model_path())
OPTIONS = {"device": "cpu", "dtype": "float32", "cache_memory": "32MiB", "max_num_seqs": 16}
STORY = "Once upon a time"
PROMPTS = [STORY, "Mia and Ben", "The old bear had", "Tell me", "A fox", "One day Lily went"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, **OPTIONS) as made:
        yield made


def tokens_of(results):
    return [[output.token_ids for output in result.outputs] for result in results]


def single(results):
    (result,) = results
    (output,) = result.outputs
    return output


# What comes in and out


def test_a_text_and_its_ids_are_the_same_prompt(llm):
    ids = llm.tokenizer.encode(STORY)
    by_text, by_ids = llm.generate([STORY, ids], GREEDY)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == ids
    assert (by_text.prompt, by_ids.prompt) == (STORY, None)
    assert by_text.outputs == by_ids.outputs
    assert by_text.outputs[0].text == llm.tokenizer.decode(by_text.outputs[0].token_ids)
    assert len(by_text.outputs[0].token_ids) == 24


def test_one_prompt_needs_no_list(llm):
    ids = llm.tokenizer.encode(STORY)
    assert tokens_of(llm.generate(STORY, GREEDY)) == tokens_of(llm.generate([STORY], GREEDY))
    assert tokens_of(llm.generate(ids, GREEDY)) == tokens_of(llm.generate([ids], GREEDY))
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_bring_its_own_parameters(llm):
    long, short = llm.generate(
        [STORY, STORY], [GREEDY, SamplingParams(temperature=0.0, max_tokens=3)]
    )
    assert long.outputs[0].token_ids[:3] == short.outputs[0].token_ids
    assert short.outputs[0].finish_reason == "length"


def test_the_default_is_16_tokens(llm):
    output = single(llm.generate(STORY))
    assert len(output.token_ids) == 16 or output.finish_reason == "stop"


def test_chat_answers_through_the_template(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=40))
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"


# Ends


def test_an_end_of_sequence_id_stops_and_is_not_part_of_the_output(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = llm.tokenizer.apply_chat_template(messages)
    output = single(llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=40)))
    assert output.finish_reason == "stop"
    assert not set(output.token_ids) & set(llm.tokenizer.eos_token_ids)
    through = single(
        llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    )
    assert len(through.token_ids) == 40
    assert through.finish_reason == "length"
    count = len(output.token_ids)
    assert through.token_ids[:count] == output.token_ids
    assert through.token_ids[count] in llm.tokenizer.eos_token_ids


def test_min_tokens_holds_the_end_back(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = llm.tokenizer.apply_chat_template(messages)
    free = single(llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=40)))
    least = len(free.token_ids) + 5
    held = single(
        llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=40, min_tokens=least))
    )
    assert len(held.token_ids) >= least
    assert held.token_ids[: len(free.token_ids)] == free.token_ids
    assert not set(held.token_ids) & set(llm.tokenizer.eos_token_ids)


def test_stop_token_ids_end_the_output(llm):
    free = single(llm.generate(STORY, GREEDY)).token_ids
    stop = free[10]
    output = single(
        llm.generate(
            STORY,
            SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop_token_ids=[stop]),
        )
    )
    assert output.finish_reason == "stop"
    assert output.token_ids == free[: free.index(stop)]


def test_a_stop_text_is_cut_off_and_frees_the_rest(llm):
    free = single(llm.generate(STORY, GREEDY)).text
    stop = free[15:20]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=["@@", stop])
    cut, whole = llm.generate([STORY, STORY], [params, GREEDY])
    assert cut.outputs[0].text == free[: free.index(stop)]
    assert cut.outputs[0].finish_reason == "stop"
    assert len(cut.outputs[0].token_ids) < 24
    assert whole.outputs[0].text == free
    assert llm.engine.scheduler.is_idle
    assert llm.engine.scheduler.allocator.free_pages == llm.model.plan.usable_pages


def test_max_tokens_none_goes_to_the_end_of_the_context():
    with LLM(MODEL, **OPTIONS | {"max_model_len": 40}) as small:
        prompt = small.tokenizer.encode(STORY)
        output = single(
            small.generate(STORY, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
        )
        assert len(prompt) + len(output.token_ids) == 40
        assert output.finish_reason == "length"


# Log-probabilities


def test_logprobs_are_those_of_transformers(llm):
    oracle = transformers.GraniteMoeHybridForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32
    ).eval()
    params = SamplingParams(
        temperature=0.7, seed=3, top_k=5, max_tokens=12, ignore_eos=True, logprobs=3
    )
    (result,) = llm.generate(STORY, params)
    output, prompt = result.outputs[0], result.prompt_token_ids
    logits = oracle_logits(oracle, prompt + output.token_ids)[len(prompt) - 1 : -1].clone()
    logits[:, llm.tokenizer.vocab_size :] = -torch.inf
    expected = logits.log_softmax(-1)
    assert len(output.logprobs) == len(output.token_ids) == 12
    for token, entry, row in zip(output.token_ids, output.logprobs, expected, strict=True):
        assert set(entry) == {token, *row.topk(3).indices.tolist()}
        for id_, value in entry.items():
            assert value.logprob == pytest.approx(row[id_].item(), abs=1e-3)
            assert value.decoded_token == llm.tokenizer.token_text(id_)


def test_logprobs_zero_gives_the_drawn_token_alone(llm):
    output = single(llm.generate(STORY, SamplingParams(max_tokens=4, seed=1, logprobs=0)))
    assert [list(entry) for entry in output.logprobs] == [[token] for token in output.token_ids]
    assert single(llm.generate(STORY, GREEDY)).logprobs is None


# Seeds


HOT = {"temperature": 1.2, "max_tokens": 20, "ignore_eos": True}


def test_a_seed_gives_the_same_tokens_in_any_batch(llm):
    params = [SamplingParams(seed=100 + i, **HOT) for i in range(len(PROMPTS))]
    together = tokens_of(llm.generate(PROMPTS, params))
    alone = [tokens_of(llm.generate(p, s))[0] for p, s in zip(PROMPTS, params, strict=True)]
    backwards = tokens_of(llm.generate(PROMPTS[::-1], params[::-1]))[::-1]
    assert together == alone == backwards


def test_seeds_and_continuations_differ(llm):
    results = llm.generate([STORY] * 3, [SamplingParams(seed=s, **HOT) for s in (1, 2, 3)])
    assert len({tuple(r.outputs[0].token_ids) for r in results}) == 3
    (several,) = llm.generate(STORY, SamplingParams(seed=1, n=3, **HOT))
    assert [output.index for output in several.outputs] == [0, 1, 2]
    texts = [tuple(output.token_ids) for output in several.outputs]
    assert len(set(texts)) == 3
    assert list(texts[0]) == results[0].outputs[0].token_ids
    (again,) = llm.generate(STORY, SamplingParams(seed=1, n=3, **HOT))
    assert again.outputs == several.outputs


def test_without_a_seed_runs_differ(llm):
    runs = llm.generate([STORY] * 3, SamplingParams(**HOT))
    assert len({tuple(run.outputs[0].token_ids) for run in runs}) == 3


def test_the_engines_seed_stands_in_for_requests_without_one(llm):
    with LLM(MODEL, seed=7, **OPTIONS) as seeded:
        first = tokens_of(seeded.generate(STORY, SamplingParams(**HOT)))
    assert first == tokens_of(llm.generate(STORY, SamplingParams(seed=7, **HOT)))


# Mistakes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, r"temperature: must lie in \[0, 100\], not -0.1"),
        ({"temperature": float("nan")}, "temperature: must lie in .*, not nan"),
        ({"temperature": float("inf")}, "temperature: must lie in .*, not inf"),
        pytest.param({"temperature": 10**400}, "temperature: must lie in", id="no float"),
        ({"temperature": "hot"}, "temperature: must be a number, not 'hot'"),
        ({"temperature": True}, "temperature: must be a number, not True"),
        ({"top_p": 0.0}, r"top_p: must lie in \(0, 1\], not 0.0"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"top_k": -2}, "top_k: must be between -1 and 2147483647, not -2"),
        ({"top_k": 2**63}, "top_k: must be between"),
        ({"top_k": 1.5}, "top_k: must be an integer, not 1.5"),
        ({"n": 0}, "n: must be between 1 and 128, not 0"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1, not 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: 5 is more than max_tokens=4"),
        ({"seed": 2**63}, "seed: must be between"),
        ({"logprobs": 21}, "logprobs: must be between 0 and 20, not 21"),
        ({"stop": ""}, "stop: must be a non-empty text"),
        ({"stop": ["a", ""]}, "stop: must be a non-empty text"),
        ({"stop": 5}, "stop: must be a non-empty text"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: -1 is not a token id"),
        ({"stop_token_ids": [2**64]}, "stop_token_ids: .* is not a token id"),
        ({"stop_token_ids": [True]}, "stop_token_ids: True is not a token id"),
        ({"stop_token_ids": 5}, "stop_token_ids: must be a list"),
    ],
    ids=str,
)
def test_a_wrong_parameter_is_named(fields, message):
    with pytest.raises(ParameterError, match=message) as caught:
        SamplingParams(**fields)
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "prompt: is empty"),
        ([[1, 1024]], "prompt: 1024 is not a token id below 1024"),
        ([[-1]], "prompt: -1 is not a token id"),
        ([["a"]], "prompt: 'a' is not a token id"),
        ([[1.0]], "prompt: 1.0 is not a token id"),
        ([None], "prompt: must be a text or a list of token ids, not None"),
        ([{"prompt": "x"}], "prompt: must be a text or a list"),
        (None, "prompt: must be a text or a list"),
        (5, "prompt: must be a text or a list"),
        ([1, True], "prompt: True is not a token id"),
    ],
    ids=str,
)
def test_a_prompt_that_is_none_is_refused(llm, prompts, message):
    with pytest.raises(ParameterError, match=message):
        llm.generate(prompts, GREEDY)
    assert llm.engine.scheduler.is_idle


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY] * 3, "sampling_params: 3 for 2 prompts"),
        ([GREEDY, None], "sampling_params: must be SamplingParams, not None"),
        ({"temperature": 0}, "sampling_params: must be SamplingParams"),
    ],
    ids=["count", "none", "mapping"],
)
def test_sampling_parameters_of_another_form_are_refused(llm, params, message):
    with pytest.raises(ParameterError, match=message):
        llm.generate([STORY, STORY], params)


def test_a_request_that_does_not_fit_is_refused_before_any_runs(llm):
    limit = llm.engine.scheduler.max_request_tokens
    before = llm.engine.scheduler.counters.prompt_tokens
    with pytest.raises(ContextLengthError, match=rf"{limit} tokens.*24 output.*at most {limit}"):
        llm.generate([STORY, [1] * limit], GREEDY)
    assert llm.engine.scheduler.is_idle
    assert llm.engine.scheduler.counters.prompt_tokens == before


def test_a_stop_id_beyond_the_vocabulary_hurts_nobody(llm):
    params = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=4, stop_token_ids=[2**31 - 1])
    assert len(single(llm.generate(STORY, params)).token_ids) == 8


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel: .*did you mean tensor_parallel_size"),
        ({"max_num_sequences": 2}, "max_num_sequences: .*did you mean max_num_seqs"),
        ({"zzz": 2}, "zzz: is not an option of the engine$"),
        ({"block_size": 8}, "block_size: .*greater than or equal to 16"),
        ({"cache_memory": "many"}, "cache_memory: .*'many' is not a size"),
        ({"dtype": "int8"}, "dtype: .*'float32'"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: "),
        ({"executor": "thread"}, "executor: must be inline or process, not 'thread'"),
    ],
    ids=str,
)
def test_an_unknown_option_names_the_nearest_and_a_wrong_one_itself(option, message):
    with pytest.raises(ParameterError, match=message):
        LLM(MODEL, device="cpu", **{k: v for k, v in option.items() if k != "device"})


def test_what_cannot_be_started_says_why(tmp_path):
    with pytest.raises(ParameterError, match="executor: inline runs one rank, not 2"):
        LLM(MODEL, device="cpu", executor="inline", tensor_parallel_size=2)
    with pytest.raises(PlanError, match="block_size=24"):
        LLM(MODEL, device="cpu", block_size=24)
    with pytest.raises(PlanError, match="cache_memory"):
        LLM(MODEL, device="cpu", cache_memory="900TiB")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        LLM(str(tmp_path), device="cpu")


def test_a_request_whose_logits_are_not_finite_fails_and_the_next_one_works(llm, monkeypatch):
    rank = llm.engine._executor._rank
    forward = rank._forward
    monkeypatch.setattr(rank, "_forward", lambda batch: forward(batch) * np.nan)
    with pytest.raises(RequestError, match="not finite"):
        llm.generate([STORY, STORY], GREEDY)
    monkeypatch.undo()
    assert llm.engine.scheduler.is_idle
    assert llm.engine.scheduler.counters.non_finite_rows == 2
    assert len(single(llm.generate(STORY, GREEDY)).token_ids) == 24


# The same tokens, however they are made


@pytest.fixture(scope="module")
def long_prompts(llm):
    """16 prompts of 1 to 121 tokens, whose 40 tokens more need more than a tiny cache has."""
    ids = llm.tokenizer.encode(" ".join(PROMPTS * 8), add_special_tokens=False)
    return [ids[i : i + 1 + 8 * i] for i in range(16)]


MANY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(llm, long_prompts):
    return tokens_of(llm.generate(long_prompts, MANY))


def test_a_tiny_cache_preempts_and_gives_the_same_tokens(long_prompts, reference):
    tiny = {"cache_memory": "2MiB", "max_model_len": 200, "max_num_batched_tokens": 64}
    for poison in (False, True):
        with LLM(MODEL, debug_poison=poison, **OPTIONS | tiny) as small:
            assert tokens_of(small.generate(long_prompts, MANY)) == reference
            assert small.engine.scheduler.counters.preemptions > 0
            assert small.engine.scheduler.allocator.free_pages == small.model.plan.usable_pages


@pytest.mark.parametrize("budget", [1, 17, 64])
def test_the_token_budget_changes_nothing(budget, long_prompts, reference):
    with LLM(MODEL, max_num_batched_tokens=budget, **OPTIONS | {"max_num_seqs": 5}) as llm:
        assert tokens_of(llm.generate(long_prompts[:8], MANY)) == reference[:8]


def test_a_poisoned_cache_changes_nothing(long_prompts, reference):
    with LLM(MODEL, debug_poison=True, **OPTIONS) as poisoned:
        assert tokens_of(poisoned.generate(long_prompts, MANY)) == reference
        assert tokens_of(poisoned.generate(long_prompts, MANY)) == reference


@pytest.mark.parametrize("executor", ["inline", "process"])
def test_a_step_ahead_changes_nothing(executor, long_prompts, reference):
    """Depth 2 with stops, sampling and a cache that is too small: as depth 1."""
    size = 1 if executor == "inline" else 2
    options = OPTIONS | {"cache_memory": "2MiB", "max_model_len": 200, "debug_poison": True}
    mixed = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=25 + i) if i % 3 else MANY
        for i in range(16)
    ]
    with LLM(
        MODEL, executor=executor, tensor_parallel_size=size, threads_per_rank=1, **options
    ) as llm:
        one = llm.generate(long_prompts, mixed)
        executor = llm.engine._executor
        executor.allocate(Allocate(plan=llm.model.plan))  # ranks forget what they served
        llm.engine = Engine(executor, llm.model, depth=2, debug_poison=True)
        two = llm.generate(long_prompts, mixed)
        # The smallest cache of two ranks has room for all that may run at once.
        assert size == 2 or llm.engine.scheduler.counters.preemptions > 0
    assert [run.outputs for run in one] == [run.outputs for run in two]
    assert tokens_of(two)[::3] == reference[::3]


def test_requests_that_share_a_batch_do_not_touch_each_other(llm, long_prompts, reference):
    for i in (0, 7, 15):
        assert tokens_of(llm.generate([long_prompts[i]], MANY)) == [reference[i]]


def test_an_object_made_in_a_thread_outlives_it(reference, long_prompts):
    """Web frameworks load models in short-lived threads; ranks must not end with them."""
    made = []
    thread = threading.Thread(
        target=lambda: made.append(
            LLM(MODEL, tensor_parallel_size=2, threads_per_rank=1, **OPTIONS)
        )
    )
    thread.start()
    thread.join()
    with made[0] as llm:
        assert tokens_of(llm.generate([long_prompts[3]], MANY)) == [reference[3]]


def test_a_rank_that_loads_again_keeps_nothing_of_the_model_before():
    llm = LLM(MODEL, executor="inline", **OPTIONS)
    llm.generate([STORY], GREEDY)
    rank = llm.engine._executor._rank
    before = [weakref.ref(rank._decoder), weakref.ref(rank._arena)]
    rank.load(rank._request)
    gc.collect()
    assert [reference() for reference in before] == [None, None]
