import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import plait.worker.sampler as sampler_module
from plait.worker.protocol import SamplingSpec
from plait.worker.sampler import logprobs, sample, token_digest, uniform

LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.5, 0.4, -3.0, 1.2, 0.0])
ALMOST_ONE = 1 - 2**-53  # the largest number that `uniform` gives


def draw(logits, spec, positions):
    """One token for each position, all from the same logits."""
    rows = logits.expand(len(positions), -1)
    return sample(rows, [spec] * len(positions), positions).tolist()


def drawn_set(logits, **options):
    """Every id that can be drawn, found by sweeping the random number over [0, 1)."""
    spec = SamplingSpec(**({"temperature": 1.0} | options))
    numbers = [*np.linspace(0, 1, 4001)[:-1].tolist(), ALMOST_ONE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "uniform", lambda seed, position: numbers[position])
        return set(draw(logits, spec, range(len(numbers))))


def chi_square(counts, probs):
    expected = np.asarray(probs) * sum(counts)
    return float(((np.asarray(counts) - expected) ** 2 / expected).sum())


def chi_square_limit(degrees):
    """What a right distribution exceeds once in a million (Wilson and Hilferty 1931)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.75 * math.sqrt(part)) ** 3


# Distribution


def test_temperature_zero_is_greedy():
    rows = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    tokens = sample(rows, [SamplingSpec(seed=i) for i in range(50)], range(50))
    assert torch.equal(tokens, rows.argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("by", ["seed", "position"])
def test_draws_follow_the_softmax(temperature, by):
    count = 20_000
    varied, fixed = range(count), [7] * count
    seeds, positions = (varied, fixed) if by == "seed" else (fixed, varied)
    specs = [SamplingSpec(temperature=temperature, seed=seed) for seed in seeds]
    tokens = sample(LOGITS.expand(count, -1), specs, list(positions))
    counts = tokens.bincount(minlength=len(LOGITS)).tolist()
    probs = (LOGITS.double() / temperature).softmax(-1).tolist()
    assert chi_square(counts, probs) < chi_square_limit(len(LOGITS) - 1)


def test_top_p_keeps_the_proportions_of_what_is_left():
    spec = [SamplingSpec(temperature=1.0, top_k=3, seed=seed) for seed in range(20_000)]
    tokens = sample(LOGITS.expand(len(spec), -1), spec, [0] * len(spec))
    counts = tokens.bincount(minlength=len(LOGITS))[[1, 3, 6]].tolist()
    assert sum(counts) == len(spec)
    probs = LOGITS[[1, 3, 6]].double().softmax(-1).tolist()
    assert chi_square(counts, probs) < chi_square_limit(2)


def test_the_chi_square_limit_refuses_a_wrong_temperature():
    spec = [SamplingSpec(temperature=1.1, seed=seed) for seed in range(20_000)]
    counts = sample(LOGITS.expand(len(spec), -1), spec, [0] * len(spec)).bincount(minlength=8)
    assert chi_square(counts.tolist(), LOGITS.softmax(-1).tolist()) > chi_square_limit(7)


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-40, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    rows = torch.randn(20, 33, generator=torch.Generator().manual_seed(0)) + 3.0
    specs = [SamplingSpec(temperature=temperature, seed=i) for i in range(20)]
    assert torch.equal(sample(rows, specs, range(20)), rows.argmax(-1))


def test_a_huge_temperature_is_uniform():
    assert drawn_set(LOGITS, temperature=100.0) == set(range(8))


# Which ids are left


@pytest.mark.parametrize("top_k", [1, 2, 5, 8, 1000])
def test_top_k_leaves_the_k_likeliest(top_k):
    order = LOGITS.argsort(descending=True).tolist()
    assert drawn_set(LOGITS, temperature=5.0, top_k=top_k) == set(order[:top_k])


def test_top_k_leaves_exactly_k_of_equals():
    assert drawn_set(torch.zeros(8), top_k=3) == {0, 1, 2}


# Probabilities 1/2, 1/4, 1/8, 1/16, 1/16: every sum below is exact.
HALVES = torch.tensor([1 / 8, 1 / 2, 1 / 16, 1 / 4, 1 / 16]).log2() * math.log(2)


@pytest.mark.parametrize(
    ("top_p", "left"),
    [
        (0.01, {1}),
        (0.49, {1}),
        (0.51, {1, 3}),
        (0.74, {1, 3}),
        (0.76, {1, 3, 0}),
        (0.9, {1, 3, 0, 2}),
        (1.0, {0, 1, 2, 3, 4}),
    ],
)
def test_top_p_leaves_the_smallest_set_that_reaches_it(top_p, left):
    assert drawn_set(HALVES, top_p=top_p) == left


@pytest.mark.parametrize(
    ("min_p", "left"),
    [
        (0.0, {0, 1, 2, 3, 4}),
        (0.12, {0, 1, 2, 3, 4}),
        (0.13, {0, 1, 3}),
        (0.26, {1, 3}),
        (0.51, {1}),
        (1.0, {1}),
    ],
)
def test_min_p_leaves_what_is_that_share_as_likely_as_the_likeliest(min_p, left):
    assert drawn_set(HALVES, min_p=min_p) == left


def test_limits_apply_together():
    assert drawn_set(HALVES, top_k=4, top_p=0.8, min_p=0.3) == {1, 3}
    assert drawn_set(HALVES, top_k=2, top_p=0.99, min_p=0.01) == {1, 3}


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_whatever_is_drawn_is_allowed(values, temperature, top_k, top_p, min_p, seed):
    logits = torch.tensor(values)
    spec = SamplingSpec(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    (token,) = draw(logits, spec, [3])
    probs = (logits.double() / temperature).softmax(-1)
    likelier = probs > probs[token] * (1 + 1e-5)
    slack = 1e-5
    assert not top_k or likelier.sum() < top_k
    assert probs[likelier].sum() < top_p + slack
    assert probs[token] >= min_p * probs.max() * (1 - 1e-4)


# Ids that must not be drawn


@pytest.mark.parametrize("number", [0.0, 2**-53, 1 - 2**-24, ALMOST_ONE])
@pytest.mark.parametrize("vocab_size", [9, 1000, 50_000])
def test_an_id_at_minus_infinity_is_never_drawn(monkeypatch, number, vocab_size):
    monkeypatch.setattr(sampler_module, "uniform", lambda seed, position: number)
    logits = torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(0))
    logits[:, vocab_size // 2 :] = -math.inf
    specs = [SamplingSpec(temperature=1.0)] * 16
    assert (sample(logits, specs, range(16)) < vocab_size // 2).all()


def test_banned_ids_are_not_drawn_below_the_position():
    spec = {"banned_token_ids": (1, 3), "banned_until": 10}
    greedy = SamplingSpec(**spec)
    assert draw(LOGITS, greedy, [8, 9, 10, 11]) == [6, 6, 1, 1]
    hot = SamplingSpec(temperature=5.0, **spec)
    drawn = draw(LOGITS, hot, [9] * 1)
    assert not set(drawn) & {1, 3}
    assert not {
        token
        for seed in range(300)
        for token in draw(LOGITS, SamplingSpec(temperature=5.0, seed=seed, **spec), [9])
    } & {1, 3}


def test_banning_touches_only_its_row_and_not_the_logits():
    rows, before = LOGITS.repeat(2, 1), LOGITS.repeat(2, 1)
    banned = SamplingSpec(banned_token_ids=(1,), banned_until=5)
    assert sample(rows, [banned, SamplingSpec()], [0, 0]).tolist() == [3, 1]
    assert torch.equal(rows, before)


def test_a_banned_id_that_the_model_does_not_have_is_no_error():
    """Stop ids come from clients; one beyond the vocabulary cannot be drawn anyway."""
    spec = SamplingSpec(banned_token_ids=(8, 10**6, 1), banned_until=5)
    assert draw(LOGITS, spec, [0]) == [3]


# Reproducible


@settings(max_examples=30, deadline=None)
@given(data=st.data(), count=st.integers(1, 12))
def test_a_row_depends_on_seed_and_position_and_not_on_the_batch(data, count):
    rows = torch.randn(count, 50, generator=torch.Generator().manual_seed(count))
    specs = [
        SamplingSpec(
            temperature=data.draw(st.sampled_from([0.0, 0.7, 1.5])),
            top_k=data.draw(st.sampled_from([0, 5])),
            top_p=data.draw(st.sampled_from([0.8, 1.0])),
            seed=data.draw(st.integers(0, 9)),
            banned_token_ids=(1, 2),
            banned_until=data.draw(st.sampled_from([0, 100])),
        )
        for _ in range(count)
    ]
    positions = [data.draw(st.integers(0, 200)) for _ in range(count)]
    together = sample(rows, specs, positions).tolist()
    alone = [sample(rows[i : i + 1], [specs[i]], [positions[i]]).item() for i in range(count)]
    assert together == alone
    order = data.draw(st.permutations(range(count)))
    shuffled = sample(rows[order], [specs[i] for i in order], [positions[i] for i in order])
    assert shuffled.tolist() == [together[i] for i in order]


def test_seeds_and_positions_give_different_tokens():
    flat = torch.zeros(1 << 16)
    by_seed = {draw(flat, SamplingSpec(temperature=1.0, seed=s), [5])[0] for s in range(30)}
    by_position = set(draw(flat, SamplingSpec(temperature=1.0, seed=5), range(30)))
    assert len(by_seed) == len(by_position) == 30


# The random numbers


def test_uniform_lies_in_the_half_open_interval_and_is_fixed():
    edges = [0, 1, -1, 2**63 - 1, -(2**63), 2**64]
    for seed in edges:
        for position in (0, 1, 2**31, 2**63):
            number = uniform(seed, position)
            assert 0.0 <= number < 1.0
            assert number == uniform(seed, position)
    assert uniform(1, 2) != uniform(2, 1)


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([(0, p) for p in range(20_000)], id="positions of one seed"),
        pytest.param([(s, 0) for s in range(20_000)], id="seeds at one position"),
        pytest.param([(s, s) for s in range(20_000)], id="seed equal to position"),
        pytest.param([(s << 40, 17) for s in range(20_000)], id="seeds that differ high up"),
    ],
)
def test_uniform_is_even_and_its_neighbours_are_independent(pairs):
    numbers = np.array([uniform(seed, position) for seed, position in pairs])
    assert len(set(numbers)) == len(numbers)
    bins = 100
    counts, _ = np.histogram(numbers, bins=bins, range=(0, 1))
    assert chi_square(counts, [1 / bins] * bins) < chi_square_limit(bins - 1)
    joint, _, _ = np.histogram2d(numbers[:-1], numbers[1:], bins=10, range=((0, 1), (0, 1)))
    assert chi_square(joint.ravel(), [1 / 100] * 100) < chi_square_limit(99)
    low_bits = (numbers * 2**53).astype(np.int64) & 7
    assert chi_square(np.bincount(low_bits, minlength=8), [1 / 8] * 8) < chi_square_limit(7)


# Log-probabilities


def test_logprobs_are_those_of_the_raw_model():
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    rows[:, 40:] = -math.inf
    specs = [
        SamplingSpec(num_logprobs=3, temperature=0.3, top_k=1, banned_token_ids=(0,)),
        SamplingSpec(),
        SamplingSpec(num_logprobs=0, temperature=3.0),
        SamplingSpec(num_logprobs=5, min_p=0.9),
    ]
    tokens = torch.tensor([4, 5, 6, 7])
    entries = logprobs(rows, tokens, specs)
    expected = rows.double().log_softmax(-1)
    assert entries[1] is None
    for row in (0, 2, 3):
        count = specs[row].num_logprobs
        values, ids = expected[row].topk(count)
        assert entries[row].logprob == pytest.approx(expected[row, tokens[row]].item(), abs=1e-5)
        assert entries[row].top_ids == tuple(ids.tolist())
        assert entries[row].top_logprobs == pytest.approx(values.tolist(), abs=1e-5)


def test_no_logprobs_are_made_when_nobody_asks():
    assert logprobs(LOGITS[None], torch.tensor([1]), [SamplingSpec()]) == ()


def test_rows_that_are_not_finite_get_an_id_and_leave_the_others_alone():
    rows = LOGITS.repeat(4, 1)
    rows[0] = math.nan
    rows[1, 2] = math.inf
    rows[2, 5] = math.nan
    for temperature in (0.0, 1.0):
        specs = [SamplingSpec(temperature=temperature, seed=3)] * 4
        tokens = sample(rows, specs, [9] * 4)
        assert ((tokens >= 0) & (tokens < 8)).all()
        assert tokens[3] == draw(LOGITS, specs[3], [9])[0]


def test_digest_shows_any_difference_of_tokens():
    assert token_digest((1, 2, 3)) == token_digest([1, 2, 3])
    others = [(1, 2), (1, 3, 2), (12, 3), (1, 2, 4), ()]
    assert len({token_digest(tokens) for tokens in [(1, 2, 3), *others]}) == 6
