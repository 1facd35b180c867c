"""The protocol between the benchmark and the process of an engine, and the turns of a case."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from plait_bench.cases import CASES, Case, EngineOptions, Timing, make_prompts
from plait_bench.installs import InstallError, run_logged
from plait_bench.process import Worker, WorkerError, environment
from plait_bench.results import CaseResult
from plait_bench.session import run_case

DECODE = Case(name="d", batch=2, prompt_tokens=3, num_steps=4)


def start(folder: Path, *, dtype: str = "float32") -> Worker:
    return Worker(
        "fake_engine",
        EngineOptions(model="", dtype=dtype, threads=1),
        python=Path(sys.executable),
        variables=environment(threads=1, python_path="", extra={}),
        log=folder / "fake.log",
    )


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with start(tmp_path) as worker:
        worker.load()
        yield worker


def test_a_worker_answers_although_libraries_print(worker: Worker):
    assert worker.versions == {"fake": "float32"}
    prompts = make_prompts(DECODE, vocab_size=10, round_idx=0)
    assert worker.time(DECODE, prompts) == Timing(first_token_s=6.0, decode_s=4.0)
    assert worker.call("greedy", prompt=[7, 8], num_tokens=2) == {"tokens": [8, 8]}
    assert worker.call("cores") == {"cores": 1}


def test_an_error_of_a_case_is_told_and_the_worker_goes_on(worker: Worker):
    failing = Case(name="f", batch=13, prompt_tokens=1)
    with pytest.raises(WorkerError, match="RuntimeError: thirteen"):
        worker.time(failing, [[1]])
    assert worker.time(DECODE, [[1]]).decode_s == 4.0


def test_a_worker_that_dies_is_told(worker: Worker):
    with pytest.raises(WorkerError, match="ended with status 3: a library prints"):
        worker.time(Case(name="f", batch=14, prompt_tokens=1), [[1]])


def test_a_model_that_does_not_load_is_told(tmp_path: Path):
    with (
        start(tmp_path, dtype="unknown") as worker,
        pytest.raises(WorkerError, match="ValueError: dtype: unknown is not known"),
    ):
        worker.load()


class Recorder:
    """Notes every call; fails from the third one on if it is asked to."""

    def __init__(
        self,
        name: str,
        calls: list[tuple[str, list[list[int]]]],
        *,
        fails: bool = False,
        seconds: float = 1.0,
    ):
        self._name = name
        self._calls = calls
        self._fails = fails
        self._seconds = seconds
        self._count = 0

    def time(self, case: Case, prompts: list[list[int]]) -> Timing:
        self._calls.append((self._name, prompts))
        self._count += 1
        if self._fails and self._count == 3:
            raise WorkerError("out of memory")
        return Timing(first_token_s=-1.0, decode_s=self._seconds * self._count)


def test_engines_take_turns_with_equal_prompts_and_a_failure_is_kept():
    calls: list[tuple[str, list[list[int]]]] = []
    engines = {"one": Recorder("one", calls), "two": Recorder("two", calls, fails=True)}
    result = CaseResult(case=DECODE, roofline_s=1.0, strict_roofline_s=1.0, weights_read=1.0)
    run_case(result, dict(engines), vocab_size=50, rounds=3)
    assert [name for name, _ in calls] == ["one", "two"] * 3 + ["one"]
    prompts = [prompts for _, prompts in calls]
    assert prompts[0] == prompts[1]
    assert prompts[0] != prompts[2]
    assert result.measurements["one"].seconds == (2.0, 3.0, 4.0)  # the first is the warm-up
    assert result.measurements["two"].seconds == ()
    assert result.measurements["two"].error == "out of memory"


def test_a_much_slower_engine_is_timed_once():
    calls: list[tuple[str, list[list[int]]]] = []
    engines = {"fast": Recorder("fast", calls), "slow": Recorder("slow", calls, seconds=8.0)}
    result = CaseResult(case=DECODE, roofline_s=1.0, strict_roofline_s=1.0, weights_read=1.0)
    run_case(result, dict(engines), vocab_size=50, rounds=3)
    assert [name for name, _ in calls] == ["fast", "slow"] * 2 + ["fast"] * 2
    assert result.measurements["slow"].seconds == (16.0,)


def test_prompts_have_the_shape_of_the_case_and_ordinary_ids():
    case = CASES["decode-8"].with_steps(3)
    prompts = make_prompts(case, vocab_size=20, round_idx=1)
    assert [len(prompt) for prompt in prompts] == [64] * 8
    assert {token for prompt in prompts for token in prompt} == set(range(3, 20))
    assert case.tokens == 24
    assert CASES["prefill-512"].with_steps(3).tokens == 512


def test_a_failed_installation_quotes_the_tool(tmp_path: Path):
    script = "import sys; print('collecting'); sys.exit('no matching distribution')"
    with pytest.raises(InstallError, match="collecting no matching distribution"):
        run_logged((sys.executable, "-c", script), tmp_path / "logs" / "x.log", {})
