"""A recurrent state that is rounded to 16 bits after every token drifts; a float32 one does not."""

import random

import pytest
import torch
from plait_testing.driver import RankDriver

from plait.cluster.executors.inline import InlineExecutor
from plait.cluster.tokenizer import Tokenizer
from plait.deploy.demo import demo_model_path
from plait.deploy.make_demo_model import corpus
from plait.worker.dtypes import CacheDtypes

NUM_STEPS, NUM_SEQUENCES, SPAN = 500, 4, 100


@pytest.fixture(scope="module")
def texts() -> dict[str, list[int]]:
    """Stories of one token more than there are steps."""
    tokenizer, rng = Tokenizer(demo_model_path()), random.Random(0)
    result = {}
    for index in range(NUM_SEQUENCES):
        ids: list[int] = []
        while len(ids) <= NUM_STEPS:
            ids += tokenizer.encode(corpus.story(rng).text + " ", add_special_tokens=False)
        result[f"story {index}"] = ids[: NUM_STEPS + 1]
    return result


def decode_logits(texts: dict[str, list[int]], *, dtype: str, ssm: str) -> torch.Tensor:
    """(sequences, steps, V): the first token is prefilled, every other one is a decode step."""
    driver = RankDriver(
        InlineExecutor(device="cpu"),
        str(demo_model_path()),
        dtype=dtype,
        dtypes=CacheDtypes(kv=dtype, conv=dtype, ssm=ssm),
        max_num_seqs=NUM_SEQUENCES,
        max_model_len=NUM_STEPS + 1,
    )
    driver.feed({name: ids[:1] for name, ids in texts.items()})
    steps = [
        torch.cat(list(driver.feed({}, {name: ids[i] for name, ids in texts.items()}).values()))
        for i in range(1, NUM_STEPS + 1)
    ]
    return torch.stack(steps, dim=1)


@pytest.fixture(scope="module")
def exact(texts) -> torch.Tensor:
    return decode_logits(texts, dtype="float32", ssm="float32")


def error(logits: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Root mean square distance to `exact` over the first and over the last steps."""
    distance = (logits - exact).pow(2)
    return tuple(float(part.mean().sqrt()) for part in (distance[:, :SPAN], distance[:, -SPAN:]))


def test_rounding_of_the_state_alone_adds_up(texts, exact):
    early, late = error(decode_logits(texts, dtype="float32", ssm="bfloat16"), exact)
    assert late > 4 * early
    half = error(decode_logits(texts, dtype="float32", ssm="float16"), exact)
    assert half[1] < late / 10


def test_float32_state_in_a_bfloat16_model_drifts_less_than_bfloat16_state(texts, exact):
    early, late = error(decode_logits(texts, dtype="bfloat16", ssm="float32"), exact)
    narrow_early, narrow_late = error(decode_logits(texts, dtype="bfloat16", ssm="bfloat16"), exact)
    assert narrow_late > 1.2 * late
    assert late < 1.1 * early  # the error of the other roundings does not grow
    assert narrow_late > 1.2 * narrow_early
