"""Every architecture equals transformers, at every TP size, in any pieces and batches."""

import pytest
import torch
from plait_testing.driver import RankDriver
from plait_testing.logits import assert_same
from plait_testing.models import TINY_MODELS


@pytest.fixture(params=sorted(TINY_MODELS))
def name(request) -> str:
    return request.param


@pytest.fixture(params=[1, 2, 4], ids="tp{}".format)
def size(request) -> int:
    return request.param


def test_logits_have_the_spread_that_shows_errors(name, checkpoints):
    _, oracle = checkpoints(name)
    assert 0.4 < oracle[200].std() < 3.0


def test_prefill_and_decode_equal_transformers(name, size, checkpoints, tokens, executors):
    path, oracle = checkpoints(name)
    driver = RankDriver(executors(size), path)
    for length, sequence in tokens.items():
        logits = driver.run("alone", sequence, prompt=length, piece=1 << 20)
        assert_same(logits, oracle[length])


@pytest.mark.parametrize("piece", [17, 64])
def test_prefill_in_pieces_equals_transformers(name, size, piece, checkpoints, tokens, executors):
    """Shorter prompts fit into one piece, which the test above has covered."""
    path, oracle = checkpoints(name)
    driver = RankDriver(executors(size), path)
    for length in (63, 64, 65, 200):
        sequence = tokens[length][: length + 4]
        logits = driver.run("pieces", sequence, prompt=length, piece=piece)
        assert_same(logits, oracle[length][: len(sequence)])


def test_mixed_batch_equals_transformers(name, size, checkpoints, tokens, executors):
    """Half the prompts decode while the other half are prefilled in the same steps."""
    path, oracle = checkpoints(name)
    driver = RankDriver(executors(size), path)
    lengths = list(tokens)
    first, second = lengths[::2], lengths[1::2]
    got = {length: [] for length in lengths}

    def feed(prefill: dict[int, list[int]], decode: list[int]) -> None:
        step = {str(n): tokens[n][sum(len(part) for part in got[n])] for n in decode}
        output = driver.feed({str(n): part for n, part in prefill.items()}, step)
        for key, logits in output.items():
            got[int(key)].append(logits)

    feed({n: tokens[n][:n] for n in first}, [])
    feed({n: tokens[n][: n // 2 + 1] for n in second}, first)
    feed({n: tokens[n][n // 2 + 1 : n] for n in second if n // 2 + 1 < n}, first)
    for _ in range(30):
        feed({}, lengths)
    for _ in range(2):
        feed({}, second)
    for length in lengths:
        logits = torch.cat(got[length])
        assert_same(logits, oracle[length][: len(logits)])
