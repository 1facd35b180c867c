"""bfloat16 models and 8-bit weights against transformers in float32."""

import random

import pytest
import torch
from plait_testing.driver import RankDriver
from plait_testing.models import TINY_MODELS, VOCAB_SIZE, oracle_logits, save_tiny_model

from plait.worker.dtypes import CacheDtypes

CACHE = CacheDtypes(kv="bfloat16", conv="bfloat16", ssm="float32")
NUM_TOKENS, PROMPT = 96, 70


def rms(values: torch.Tensor) -> float:
    return float(values.double().pow(2).mean().sqrt())


@pytest.fixture(scope="module", params=sorted(TINY_MODELS))
def case(request, tmp_path_factory):
    """A checkpoint in bfloat16, its exact logits and those of transformers in bfloat16."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = save_tiny_model(TINY_MODELS[request.param], folder)
    oracle.bfloat16().save_pretrained(folder)
    rng = random.Random(1)
    tokens = [rng.randrange(VOCAB_SIZE) for _ in range(NUM_TOKENS)]
    rounded = oracle_logits(oracle, tokens)
    return str(folder), tokens, oracle_logits(oracle.float(), tokens), rounded


def logits(executor, folder, tokens, **options) -> torch.Tensor:
    driver = RankDriver(executor, folder, dtype="bfloat16", dtypes=CACHE, **options)
    return driver.run("a", tokens, prompt=PROMPT, piece=30)


@pytest.mark.parametrize("size", [1, 2], ids="tp{}".format)
def test_bfloat16_is_as_exact_as_transformers(case, executors, size):
    folder, tokens, exact, rounded = case
    ours = logits(executors(size), folder, tokens)
    assert rms(ours - exact) < 1.2 * rms(rounded - exact)


@pytest.mark.parametrize("size", [1, 2], ids="tp{}".format)
def test_int8_weights_stay_near(case, executors, size):
    """A row of a weight loses 1/254 of its largest element at most, and errors average out."""
    folder, tokens, exact, _ = case
    ours = logits(executors(size), folder, tokens, quantization="int8")
    plain = logits(executors(size), folder, tokens)
    assert not torch.equal(ours, plain)
    assert rms(ours - exact) < rms(plain - exact) + 0.05 * rms(exact)
