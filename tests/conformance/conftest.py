"""Checkpoints are written once per session; ranks live in one pool per TP size."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from plait_testing.models import TINY_MODELS, VOCAB_SIZE, oracle_logits, save_tiny_model

from plait.cluster.executors.base import Executor
from plait.cluster.executors.inline import InlineExecutor
from plait.cluster.executors.process import ProcessExecutor

PROMPT_LENGTHS = (1, 2, 3, 4, 63, 64, 65, 200)
NUM_DECODE = 32


@pytest.fixture(scope="session")
def tokens() -> dict[int, list[int]]:
    """A sequence of prompt plus decoded tokens for each prompt length."""
    rng = random.Random(0)
    return {
        length: [rng.randrange(VOCAB_SIZE) for _ in range(length + NUM_DECODE)]
        for length in PROMPT_LENGTHS
    }


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, tokens) -> Callable[[str], tuple[str, dict[int, torch.Tensor]]]:
    """By name: the folder of a tiny checkpoint and the oracle's logits for each prompt length."""
    cache = {}

    def get(name: str) -> tuple[str, dict[int, torch.Tensor]]:
        if name not in cache:
            folder = tmp_path_factory.mktemp(name)
            oracle = save_tiny_model(TINY_MODELS[name], folder)
            cache[name] = str(folder), {n: oracle_logits(oracle, t) for n, t in tokens.items()}
        return cache[name]

    return get


@pytest.fixture(scope="session")
def executors() -> Iterator[Callable[[int], Executor]]:
    """The ranks of a TP size; models are loaded into them one after the other."""
    pool: dict[int, Executor] = {}

    def get(size: int) -> Executor:
        if size not in pool:
            pool[size] = (
                InlineExecutor(device="cpu")
                if size == 1
                else ProcessExecutor(size=size, device="cpu", threads_per_rank=1)
            )
        return pool[size]

    yield get
    for executor in pool.values():
        executor.shutdown()
