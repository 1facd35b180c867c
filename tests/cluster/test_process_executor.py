"""Ranks in processes: what differs or breaks ends all of them soon, and a message says what."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from plait_testing.models import TINY_MODELS, TinyModel, save_tiny_model
from plait_testing.processes import is_alive, poll

from plait.cluster.controller import start_model
from plait.cluster.executors.process import ProcessExecutor
from plait.cluster.llm import LLM
from plait.cluster.planner import plan_layout
from plait.cluster.request import RequestSpec
from plait.cluster.settings import engine_settings
from plait.deploy.demo import demo_model_path
from plait.worker import protocol
from plait.worker.architectures import load_spec
from plait.worker.dtypes import CacheDtypes
from plait.worker.errors import PlanError, PlanMismatch, RankError, WeightsError

MODEL = str(demo_model_path())
OPTIONS = {"device": "cpu", "dtype": "float32", "cache_memory": "8MiB", "max_num_seqs": 4}
SETTINGS = engine_settings(OPTIONS | {"tensor_parallel_size": 2})
START_S = 90.0  # a hang shows, a loaded machine passes
LONG = RequestSpec(request_id="long", prompt_token_ids=(1, 5, 9), max_tokens=500, seed=1)


def children() -> set[psutil.Process]:
    return {child for child in psutil.Process().children() if is_alive(child)}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = children()
    yield
    assert poll(lambda: children() <= before, timeout_s=2.0), children() - before


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def executor_of(size: int = 2, **options) -> ProcessExecutor:
    return ProcessExecutor(size=size, device="cpu", threads_per_rank=1, **options)


def start(executor: ProcessExecutor, model: str = MODEL):
    return start_model(executor, model, SETTINGS, device="cpu", decodable_vocab_size=1024)


def llm_of(**options) -> LLM:
    return LLM(MODEL, tensor_parallel_size=2, threads_per_rank=1, **OPTIONS | options)


def all_gone(pids: tuple[int, ...]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def tamper(
    executor: ProcessExecutor,
    rank: int,
    kind: type[protocol.Message],
    change: Callable[[protocol.Message], protocol.Message],
) -> None:
    """What `rank` gets of `kind` is not what the others get."""
    channel = executor._channels[rank]
    send = channel.send

    def changed(data: bytes, **options) -> None:
        request = protocol.decode_request(data)
        send(protocol.encode(change(request)) if isinstance(request, kind) else data, **options)

    channel.send = changed


# Starts that must not happen


def other_layout(**dtypes: str):
    known = {"kv": "float32", "conv": "float32", "ssm": "float32"} | dtypes
    return plan_layout(load_spec(MODEL), tp=2, dtypes=CacheDtypes(**known))


def wider(layout):
    """Twice the stride of everything; sections stay where they are."""
    raw = msgspec.to_builtins(layout)
    raw["page_bytes"] *= 2
    for kind in raw["kinds"]:
        kind["stride_bytes"] *= 2
    return msgspec.convert(raw, type(layout))


@pytest.mark.parametrize(
    ("layout", "lines"),
    [
        pytest.param(
            lambda: other_layout(ssm="bfloat16"),
            [
                "rank 1: layer 0 state.ssm: dtype is float32 in the plan, bfloat16 in the built",
                "rank 1: layer 4 state.ssm: dtype is",
                "rank 1: holds layout ",
            ],
            id="dtype",
        ),
        pytest.param(
            lambda: wider(other_layout()),
            ["rank 1: holds layout "],
            id="stride",
        ),
    ],
)
def test_a_rank_that_was_given_another_layout_stops_the_start(layout, lines):
    executor = executor_of()
    other = layout()
    tamper(executor, 1, protocol.Load, lambda m: msgspec.structs.replace(m, layout=other))
    with pytest.raises(PlanMismatch) as caught, within(START_S):
        start(executor)
    message = str(caught.value)
    assert all(line in message for line in lines), message
    assert "rank 0" not in message
    executor.shutdown()


def test_a_layout_for_another_number_of_ranks_is_refused_by_the_rank():
    executor = executor_of()
    other = plan_layout(
        load_spec(MODEL), tp=4, dtypes=CacheDtypes(kv="float32", conv="float32", ssm="float32")
    )
    tamper(executor, 1, protocol.Load, lambda m: msgspec.structs.replace(m, layout=other))
    with pytest.raises(PlanMismatch, match="rank 1: the plan is for tensor_parallel_size=4"):
        start(executor)
    executor.shutdown()


def test_a_layout_that_is_not_sound_is_refused_by_the_rank():
    executor = executor_of()
    broken = msgspec.to_builtins(other_layout())
    broken["page_bytes"] += 1
    layout = msgspec.convert(broken, type(other_layout()))
    tamper(executor, 1, protocol.Load, lambda m: msgspec.structs.replace(m, layout=layout))
    with pytest.raises(PlanError, match="the cache layout is not sound: page_bytes="):
        start(executor)
    executor.shutdown()


def test_another_plan_than_the_verified_layout_is_refused_by_the_rank():
    executor = executor_of()
    tamper(
        executor,
        1,
        protocol.Allocate,
        lambda m: protocol.Allocate(
            plan=msgspec.convert(
                msgspec.to_builtins(m.plan)
                | {"layout": msgspec.to_builtins(other_layout(kv="float16"))},
                type(m.plan),
            )
        ),
    )
    with pytest.raises(PlanMismatch, match=r"rank 1 verified layout .* but the plan holds "):
        start(executor)
    executor.shutdown()


def test_a_plan_with_other_pages_is_not_acknowledged():
    executor = executor_of()
    tamper(
        executor,
        1,
        protocol.Allocate,
        lambda m: protocol.Allocate(
            plan=type(m.plan)(layout=m.plan.layout, num_pages=m.plan.num_pages + 1)
        ),
    )
    with pytest.raises(PlanMismatch, match=r"rank 1 acknowledged plan .*, not "):
        start(executor)
    executor.shutdown()


def test_a_layer_of_another_shape_is_named_by_the_rank(tmp_path):
    """Rank 1 reads another checkpoint of the same family, whose state is half as wide."""
    tiny = TINY_MODELS["bamba"]
    narrow = TinyModel(
        name="narrow",
        model_class=tiny.model_class,
        config_class=tiny.config_class,
        config={**tiny.config, "mamba_d_state": 8},
    )
    for name, model in (("wide", tiny), ("narrow", narrow)):
        save_tiny_model(model, tmp_path / name)
    executor = executor_of()
    other = str(tmp_path / "narrow")
    tamper(executor, 1, protocol.Load, lambda m: msgspec.structs.replace(m, model_path=other))
    with pytest.raises(PlanMismatch) as caught, within(START_S):
        start_model(
            executor, str(tmp_path / "wide"), SETTINGS, device="cpu", decodable_vocab_size=101
        )
    message = str(caught.value)
    assert message.startswith("rank 1 built other layers than the plan says:")
    assert "layer 0 state.ssm: shape is (4, 16, 16) in the plan, (4, 16, 8) in the" in message
    assert "layer 2 state.conv: shape is (3, 96) in the plan, (3, 80) in the" in message
    executor.shutdown()


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the demo model, to be spoilt."""
    return Path(shutil.copytree(MODEL, tmp_path / "copy"))


def spoil_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_weights_that_do_not_fit_the_config_are_named(copy):
    spoil_config(copy, mamba_d_state=16)
    with pytest.raises(WeightsError) as caught, within(START_S):
        LLM(str(copy), tensor_parallel_size=2, threads_per_rank=1, **OPTIONS)
    message = str(caught.value)
    assert "'model.layers.0.mamba.in_proj.weight' has shape (584, 128)" in message
    assert "config.json makes it (552, 128)" in message


def test_a_truncated_weight_file_is_named(copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match=f"{path} cannot be read: "), within(START_S):
        LLM(str(copy), tensor_parallel_size=2, threads_per_rank=1, **OPTIONS)


def test_a_program_that_cannot_start_its_model_ends_with_the_message(copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    options = f"{str(copy)!r}, tensor_parallel_size=2, device='cpu'"
    code = f"from plait.cluster.llm import LLM; LLM({options})"
    with within(START_S):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"WeightsError: {path} cannot be read" in done.stderr.strip().splitlines()[-1]


def test_ranks_that_could_not_load_a_model_can_load_another(copy):
    (copy / "model.safetensors").write_bytes(b"")
    executor = executor_of()
    with pytest.raises(WeightsError):
        start(executor, str(copy))
    assert start(executor).plan.layout.tensor_parallel_size == 2
    executor.shutdown()


def test_memory_that_is_not_there_is_refused_with_the_numbers():
    with pytest.raises(PlanError, match=r"cache_memory=.* bytes per rank, but .* of 2 ranks has"):
        llm_of(cache_memory="900TiB")


# Ranks that die, hang or disagree


def run(llm: LLM, *, steps: int) -> None:
    for _ in range(steps):
        llm.engine.step()


def drive(llm: LLM, *, steps: int) -> tuple[int, ...]:
    llm.engine.add(LONG)
    run(llm, steps=steps)
    pids = llm.engine._executor.pids
    assert len(pids) == 2
    assert all(psutil.pid_exists(pid) for pid in pids)
    return pids


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_between_steps_is_noticed_at_once(rank):
    with llm_of() as llm:
        pids = drive(llm, steps=5)
        os.kill(pids[rank], signal.SIGKILL)
        with pytest.raises(RankError, match=rf"rank {rank} .*killed by signal 9"), within(2.0):
            run(llm, steps=3)
        assert all_gone(pids)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_the_other_waits_for_it_is_noticed_at_once(rank):
    """The other rank is stuck in a collective, and would be for the time limit of a step."""
    with llm_of() as llm:
        pids = drive(llm, steps=5)
        os.kill(pids[rank], signal.SIGSTOP)
        killer = threading.Timer(0.5, os.kill, (pids[rank], signal.SIGKILL))
        killer.start()
        with pytest.raises(RankError, match=rf"rank {rank} .*killed by signal 9"), within(2.5):
            llm.engine.step()
        killer.join()
        assert all_gone(pids)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_ended_after_the_time_limit(rank):
    with llm_of(step_timeout_s=1.0) as llm:
        pids = drive(llm, steps=5)
        os.kill(pids[rank], signal.SIGSTOP)
        start_s = time.monotonic()
        with pytest.raises(RankError, match=r"rank \d did not answer within 1 s$"), within(3.0):
            llm.engine.step()
        assert time.monotonic() - start_s > 0.9
        assert all_gone(pids)


def test_a_rank_that_takes_no_message_is_ended_after_the_time_limit():
    """A step that no socket buffer holds must not block the sender for ever."""
    with llm_of(step_timeout_s=1.0) as llm:
        pids = drive(llm, steps=1)
        os.kill(pids[1], signal.SIGSTOP)
        row = protocol.PrefillRow(seat=0, start=0, token_ids=(500,) * 1_000_000, sample=False)
        with pytest.raises(RankError, match="rank 1 took no message within 1 s"), within(3.0):
            llm.engine._executor.submit(protocol.StepInput(step=9, prefill=(row,)))
        assert all_gone(pids)


def test_an_error_in_a_step_ends_all_ranks_and_tells_where_it_was():
    with llm_of() as llm:
        pids = drive(llm, steps=1)
        stale = protocol.NewSequence(seat=0, slot=9, generation=0, sampling=protocol.SamplingSpec())
        llm.engine._executor.submit(protocol.StepInput(step=9, new=(stale,)))
        with pytest.raises(RankError, match="slot 9 given to seat 0") as caught, within(3.0):
            llm.engine._executor.collect()
        assert "Traceback" in str(caught.value)
        assert poll(lambda: all_gone(pids), timeout_s=1.0)


def test_ranks_that_draw_other_tokens_are_ended():
    with llm_of() as llm:
        executor = llm.engine._executor

        def reseed(step: protocol.StepInput) -> protocol.StepInput:
            new = tuple(
                msgspec.structs.replace(
                    sequence, sampling=msgspec.structs.replace(sequence.sampling, seed=2)
                )
                for sequence in step.new
            )
            return msgspec.structs.replace(step, new=new)

        tamper(executor, 1, protocol.StepInput, reseed)
        hot = msgspec.structs.replace(LONG, temperature=100.0)
        llm.engine.add(hot)
        pids = executor.pids
        with pytest.raises(RankError, match="rank 1 drew other tokens than rank 0 in step 1"):
            run(llm, steps=5)
        assert all_gone(pids)


def test_shutdown_ends_ranks_and_may_be_repeated():
    executor = executor_of()
    pids, folder = executor.pids, Path(executor._folder.name)
    start(executor)
    assert not folder.exists()  # a controller that is killed leaves no file either
    executor.shutdown()
    assert all_gone(pids)
    executor.shutdown()


def test_shutdown_before_the_start_leaves_nothing():
    executor = executor_of()
    pids, folder = executor.pids, Path(executor._folder.name)
    assert folder.exists()
    executor.shutdown()
    assert all_gone(pids)
    assert not folder.exists()


def test_shutdown_does_not_wait_for_a_rank_that_is_stopped():
    executor = executor_of()
    start(executor)
    pids = executor.pids
    os.kill(pids[0], signal.SIGSTOP)
    with within(3.0):
        executor.shutdown()
    assert all_gone(pids)


# A controller that dies


HOLDER = f"""
import sys, time
from plait.cluster.executors.process import ProcessExecutor
from plait.cluster.llm import LLM
from plait.cluster.request import RequestSpec
if sys.argv[1] == "starting":
    executor = ProcessExecutor(size=2, device="cpu", threads_per_rank=1)
    print(*executor.pids, flush=True)
else:
    llm = LLM({MODEL!r}, tensor_parallel_size=2, device="cpu", threads_per_rank=1,
              cache_memory="8MiB", max_num_seqs=4)
    print(*llm.engine._executor.pids, flush=True)
    if sys.argv[1] == "stepping":
        sys.stdin.readline()
        llm.engine.add(RequestSpec(request_id="x", prompt_token_ids=(1,), max_tokens=9, seed=1))
        llm.engine.step()
time.sleep(600)
"""


@contextlib.contextmanager
def holder(doing: str) -> Iterator[tuple[subprocess.Popen, list[psutil.Process]]]:
    """A process that holds two ranks."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, doing],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            ranks = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
            assert len(ranks) == 2
            yield process, ranks
        finally:
            process.kill()


def test_ranks_end_with_a_killed_controller():
    with holder("waiting") as (process, ranks):
        process.kill()
        assert poll(lambda: not any(map(is_alive, ranks)), timeout_s=2.0)


def test_ranks_that_are_still_starting_end_with_a_killed_controller():
    with holder("starting") as (process, ranks):
        process.kill()
        assert poll(lambda: not any(map(is_alive, ranks)), timeout_s=START_S)


def test_a_rank_stuck_in_a_collective_ends_with_a_killed_controller():
    with holder("stepping") as (process, ranks):
        ranks[1].suspend()
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(1.0)
        process.kill()
        assert poll(lambda: not is_alive(ranks[0]), timeout_s=2.0)
        ranks[1].resume()
        assert poll(lambda: not is_alive(ranks[1]), timeout_s=2.0)
