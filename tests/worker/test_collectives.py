"""Sums and gathers between real processes."""

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plait_testing import collective_rank as call
from plait_testing.collective_rank import Ranks, contribution

from plait.worker.collectives import TensorParallel
from plait.worker.errors import RankError
from plait.worker.shared_memory import group
from plait.worker.shared_memory.group import Peer

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CHUNK = (2 << 20) // 4  # float32 elements that go through the segment at once


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """The ranks of a size, started once."""
    started: dict[int, Ranks] = {}

    def get(size: int) -> Ranks:
        if size not in started:
            started[size] = Ranks(size, tmp_path_factory.mktemp("ranks"))
        return started[size]

    yield get
    for ranks in started.values():
        ranks.close()


@pytest.fixture
def fresh(tmp_path):
    """Two ranks that a test may break."""
    ranks = Ranks(2, tmp_path)
    yield ranks
    ranks.close()


def exact_sum(shape, dtype, seed, size):
    return sum(contribution(shape, dtype, seed, rank).double() for rank in range(size))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    "shape", [(1,), (15,), (3, 17), (1, 768), (200, 768), (CHUNK + 1,), (5, CHUNK // 2)]
)
def test_every_rank_gets_the_same_rounded_sum(pool, size, dtype, shape):
    results = pool(size).run(call.reduce, shape, dtype, 3)
    exact = exact_sum(shape, dtype, 3, size)
    # Sums in float32, then one rounding.
    allowed = exact.abs() * torch.finfo(dtype).eps + 1e-6
    assert ((results[0] - exact).abs() <= allowed).all()
    assert results[0].dtype == dtype
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shape", [(1, 5), (7, 1000), (40, 32000), (0, 6)])
def test_gather_joins_rows_in_rank_order(pool, size, shape):
    expected = torch.cat([contribution(shape, F32, 4, rank) for rank in range(size)], dim=-1)
    for result in pool(size).run(call.gather, shape, F32, 4):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_other_dtypes_go_through_gloo(pool, dtype):
    results = pool(2).run(call.reduce, (9,), dtype, 5)
    assert all(torch.equal(r.double(), exact_sum((9,), dtype, 5, 2)) for r in results)


def test_a_row_that_does_not_fit_is_gathered_through_gloo(pool):
    shape = (2, CHUNK + 3)
    expected = torch.cat([contribution(shape, F32, 6, rank) for rank in range(2)], dim=-1)
    assert all(torch.equal(result, expected) for result in pool(2).run(call.gather, shape, F32, 6))


@pytest.mark.parametrize("size", [2, 4])
def test_thousands_of_reductions_in_a_row(pool, size):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 3000, (2000,), generator=generator).tolist()
    sizes[::100] = [100_000] * 20
    for worst in pool(size).run(call.many, sizes):
        assert len(worst) == 2000
        assert max(worst) == 0.0


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_a_host_share_memory(pool, size):
    assert all(pool(size).run(call.uses_shared_memory))


def test_a_waiting_rank_sleeps(pool):
    assert pool(2).run(call.cpu_seconds_while_waiting, 1.0)[1] < 0.5


def test_no_name_is_left_in_the_file_system(pool):
    assert all(pool(2).run(call.uses_shared_memory))
    assert not [path for path in Path("/dev/shm").iterdir() if "plait" in path.name]


def test_a_rank_that_is_gone_is_named_at_once(fresh):
    assert all(fresh.run(call.uses_shared_memory))
    victim = fresh.processes[1]
    fresh.start(call.reduce, (100,), F32, 1, only=0)
    victim.kill()
    start = time.monotonic()
    (error,) = fresh.results(only=0)
    assert isinstance(error, RankError)
    assert f"rank 1 (process {victim.pid}) is gone" in str(error)
    assert time.monotonic() - start < 30  # the time limit is 60 s


def test_a_rank_that_hangs_is_named_after_the_time_limit(fresh):
    assert all(fresh.run(call.uses_shared_memory))
    fresh.run(call.set_time_limit, 0.5)
    os.kill(fresh.processes[1].pid, signal.SIGSTOP)
    fresh.start(call.reduce, (100,), F32, 1, only=0)
    (error,) = fresh.results(only=0)
    os.kill(fresh.processes[1].pid, signal.SIGCONT)
    assert isinstance(error, RankError)
    assert "rank 1 did not come to operation 1 within 0.5 s; rank 0 waited" in str(error)


def test_without_a_compiler_sums_go_through_gloo(tmp_path):
    nothing = tmp_path / "empty"
    nothing.mkdir()
    environment = {"CC": "no-such-compiler", "PLAIT_NATIVE_CACHE": str(nothing)}
    ranks = Ranks(2, tmp_path, environment=environment)
    try:
        assert not any(ranks.run(call.uses_shared_memory))
        results = ranks.run(call.reduce, (50,), F32, 2)
        torch.testing.assert_close(results[0].double(), exact_sum((50,), F32, 2, 2))
    finally:
        ranks.close()


def test_a_process_is_told_from_a_later_one_with_its_id():
    me = Peer.here()
    assert me.is_alive()
    assert not replace(me, start_ticks=me.start_ticks + 1).is_alive()
    child = subprocess.Popen(["true"])
    peer = Peer(child.pid, group._stat(child.pid)[1])
    time.sleep(0.2)  # ended, but its parent has not waited for it: a zombie
    assert not peer.is_alive()
    child.wait()
    assert not peer.is_alive()


def test_one_rank_needs_nobody():
    alone, x = TensorParallel(), torch.ones(3, 4)
    assert alone.all_reduce(x) is x
    assert alone.all_gather(x) is x
    alone.close()
