"""Starts that fail say why and leave nothing behind; so does a stop."""

import shutil
import signal
import socket
import time

import pytest
from plait_testing.processes import poll
from plait_testing.server import Server, launched, started
from plait_testing.streams import Streams

from plait.deploy.demo import demo_model_path

pytestmark = pytest.mark.ray

TWO_RANKS = {"tensor_parallel_size": 2, "device": "cpu"}
BEFORE_RAY_S = 20.0  # imports; this is a loaded machine
WITH_RAY_S = 90.0


def check_failure(server: Server, *, within_s: float, says: tuple[str, ...]) -> None:
    """The start ends with a message that is no traceback, and nothing is left of it."""
    start = time.monotonic()

    def has_ended() -> bool:
        server.processes()
        return server.process.poll() is not None

    assert poll(has_ended, timeout_s=within_s), f"still runs:\n{server.log()}"
    print(f"failed after {time.monotonic() - start:.1f} s")
    assert server.process.returncode not in (0, None)
    _, _, message = server.log().rpartition("Error: ")
    for word in says:
        assert word in message, server.log()
    assert "Traceback" not in message
    assert server.left_behind() == []


@pytest.mark.parametrize("kind", ["truncated", "tensor missing"])
def test_broken_weights(kind, tmp_path):
    model = tmp_path / "broken-model"
    shutil.copytree(demo_model_path(), model)
    weights = model / "model.safetensors"
    data = weights.read_bytes()
    if kind == "truncated":
        weights.write_bytes(data[: len(data) // 2])
    else:
        weights.write_bytes(data.replace(b"model.norm.weight", b"model.form.weight", 1))
    says = "model.form.weight" if kind == "tensor missing" else "model.safetensors"
    with launched(str(model), **TWO_RANKS) as server:
        check_failure(server, within_s=WITH_RAY_S, says=(says,))


@pytest.mark.parametrize("size", [3, 64])
def test_tensor_parallel_size_that_the_model_cannot_have(size):
    with launched(tensor_parallel_size=size, device="cpu") as server:
        check_failure(server, within_s=BEFORE_RAY_S, says=(f"{size}", "1, 2"))


def test_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with launched(port=port, **TWO_RANKS) as server:
            check_failure(server, within_s=WITH_RAY_S, says=(f"{port}", "in use"))


def test_gpu_on_a_machine_without():
    with launched(tensor_parallel_size=2, device="cuda") as server:
        check_failure(server, within_s=WITH_RAY_S, says=("need 2 GPU",))


def test_no_such_model():
    with launched("/no/such/folder", **TWO_RANKS) as server:
        check_failure(server, within_s=BEFORE_RAY_S, says=("/no/such/folder",))


def test_flag_with_a_typing_error():
    with launched("--tensor-paralel-size", "2") as server:
        check_failure(server, within_s=BEFORE_RAY_S, says=("--tensor-parallel-size",))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_while_it_starts(number):
    with launched(**TWO_RANKS) as server:
        assert poll(lambda: len(server.processes()) > 5, timeout_s=40.0), server.log()
        server.process.send_signal(number)
        server.process.wait(60.0)
        assert server.left_behind() == []


def test_graceful_stop_lets_requests_end():
    """SIGTERM with a request under way: it is served, the exit code is 0, nothing is left."""
    with started() as server:
        body = {"model": "demo_model", "prompt": "Once upon a time", "temperature": 0}
        streams = Streams(server, 2, body | {"stream": True, "ignore_eos": True, "max_tokens": 150})
        assert poll(lambda: streams.all_draw(3), timeout_s=30.0)
        assert server.stop() == 0
        assert streams.have_ended(10.0)
        assert [answer.error for answer in streams.answers] == [None, None]
        assert [answer.is_done for answer in streams.answers] == [True, True]
        assert server.left_behind() == []
