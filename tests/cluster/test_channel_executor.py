"""Which of several failures is told, with ranks that the test plays itself behind real channels."""

import socket
import threading
from collections.abc import Iterator

import pytest
from plait_testing.fake_rank import fake_plan

from plait.cluster.executors.base import ChannelExecutor
from plait.worker import protocol
from plait.worker.channel import Channel
from plait.worker.errors import RankError, WeightsError

PLAN = fake_plan({"kv": 1}, num_pages=2, block_size=16)


class ScriptedExecutor(ChannelExecutor):
    """Two ranks that the test plays itself, by the other ends of their channels."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.was_killed = False
        self.ranks = [Channel(theirs, peer="the controller") for _, theirs in pairs]
        super().__init__(
            [Channel(ours, peer=f"rank {rank}") for rank, (ours, _) in enumerate(pairs)],
            load_timeout_s=1.0,
            step_timeout_s=1.0,
        )

    def kill(self) -> None:
        self.was_killed = True


@pytest.fixture
def scripted() -> Iterator[ScriptedExecutor]:
    executor = ScriptedExecutor()
    yield executor
    executor.shutdown()
    for rank in executor.ranks:
        rank.close()


def reply(executor: ScriptedExecutor, rank: int, message: protocol.Message) -> None:
    executor.ranks[rank].send(protocol.encode(message))


def failure(kind: str, message: str) -> protocol.Failure:
    return protocol.Failure(kind=kind, message=message, traceback="Traceback of it")


def step_output(step: int = 1, *, digest: int = 5) -> protocol.StepOutput:
    return protocol.StepOutput(step=step, token_ids=(3,), token_digest=digest)


def test_the_first_ranks_answer_is_the_steps(scripted):
    reply(scripted, 1, protocol.StepOutput(step=1, token_digest=5))
    reply(scripted, 0, step_output())
    assert scripted.collect().token_ids == (3,)
    assert not scripted.was_killed


def test_answers_wait_for_their_turn(scripted):
    for step in (1, 2):
        for rank in (0, 1):
            reply(scripted, rank, step_output(step))
    assert [scripted.collect().step for _ in range(2)] == [1, 2]


@pytest.mark.parametrize(
    "other", [step_output(2), step_output(digest=6)], ids=["another step", "other tokens"]
)
def test_ranks_out_of_step_are_ended(scripted, other):
    reply(scripted, 0, step_output())
    reply(scripted, 1, other)
    with pytest.raises(RankError, match="rank 1 drew other tokens than rank 0 in step 1"):
        scripted.collect()
    assert scripted.was_killed


def test_a_death_is_told_rather_than_what_others_failed_with_for_it(scripted):
    reply(scripted, 0, failure("RuntimeError", "Connection closed by peer"))
    scripted.ranks[1].close()
    with pytest.raises(RankError, match=r"^rank 1 closed the connection$"):
        scripted.collect()
    assert scripted.was_killed


def test_a_failure_is_told_rather_than_the_silence_of_those_who_wait_for_that_rank(scripted):
    reply(scripted, 1, failure("RuntimeError", "out of memory"))
    with pytest.raises(RankError, match="rank 1 failed with RuntimeError: out of memory\nTrace"):
        scripted.collect()
    assert scripted.was_killed


def test_a_failure_of_a_known_kind_keeps_its_type(scripted):
    for rank in (0, 1):
        reply(scripted, rank, failure("WeightsError", "no tensor"))
    with pytest.raises(WeightsError, match=r"^no tensor$"):
        scripted.allocate(protocol.Allocate(plan=PLAN))
    assert not scripted.was_killed  # both have answered: they can load another model


def test_an_answer_of_the_wrong_kind_is_an_error(scripted):
    for rank in (0, 1):
        reply(scripted, rank, protocol.Ready(plan_digest="", arena_bytes=1))
    with pytest.raises(RankError, match="a rank answered Ready where StepOutput was due"):
        scripted.collect()


def test_messages_of_any_size_arrive_whole(scripted):
    logits = bytes(range(256)) * 40_000
    big = protocol.StepOutput(step=1, logits=logits, token_digest=0)
    threads = [threading.Thread(target=reply, args=(scripted, rank, big)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    assert scripted.collect().logits == logits
    for thread in threads:
        thread.join()
