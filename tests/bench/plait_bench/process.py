"""The parent's end of a worker process."""

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from plait_bench.cases import Case, EngineOptions, Timing, to_json

HERE: Final = Path(__file__).resolve().parents[1]  # the folder to import plait_bench from
LOAD_TIMEOUT_S: Final = 1200.0
CALL_TIMEOUT_S: Final = 900.0
_CLOSE_TIMEOUT_S: Final = 20.0


class WorkerError(Exception):
    """An engine could not do what it was asked; the text is its own."""


def environment(*, threads: int, python_path: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Variables that must stand before an engine loads: equal threads, which sleep when idle."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return own | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), python_path))),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **extra,
    }


class Worker:
    """One engine with one model. Start it, load it, call it, close it."""

    def __init__(
        self,
        module: str,
        options: EngineOptions,
        *,
        python: Path,
        variables: Mapping[str, str],
        log: Path,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [
                    *(str(python), "-m", "plait_bench.worker", module),
                    json.dumps(to_json(options)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=dict(variables),
                start_new_session=True,
            )
        self._log = log
        self._buffer = b""
        self.versions: dict[str, str] = {}

    def load(self) -> None:
        """Wait until the model is loaded; raises `WorkerError`."""
        self.versions = self._reply(LOAD_TIMEOUT_S)["versions"]

    def call(self, op: str, **arguments: object) -> dict[str, Any]:
        """Send a command and give its reply; raises `WorkerError`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing reply says more
            self._process.stdin.write((json.dumps({"op": op, **arguments}) + "\n").encode())
            self._process.stdin.flush()
        return self._reply(CALL_TIMEOUT_S)

    def time(self, case: Case, prompts: list[list[int]]) -> Timing:
        return Timing(**self.call("time", case=to_json(case), prompts=prompts))

    def close(self) -> None:
        """End the process, whatever it does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self._line(timeout_s))
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._process.kill()
                    raise WorkerError(f"no answer within {timeout_s:.0f} s")
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    raise WorkerError(self._death())
                self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _death(self) -> str:
        status = self._process.wait()
        text = self._log.read_text(errors="replace")
        last = [line for line in text.splitlines() if line.strip()][-1:]
        return f"the process ended with status {status}: {''.join(last)[-300:] or 'no output'}"
