"""Local rank processes without Ray, each behind a socket pair."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from plait.cluster.executors.base import ChannelExecutor
from plait.worker import protocol
from plait.worker.channel import Channel

# Matrix products in bf16 keep what they prepared for each number of rows: 1024 of them, which take
# half a gigabyte, where nobody says less.
_PREPARED_PRODUCTS = 48


def rank_environment(threads: int) -> dict[str, str]:
    """Variables that must stand before torch loads: threads sleep, and memory has a bound."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "LRU_CACHE_CAPACITY": str(_PREPARED_PRODUCTS),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(_PREPARED_PRODUCTS),
    }


def default_threads(tensor_parallel_size: int) -> int:
    """CPU threads of each of the ranks that share this host."""
    return max(1, len(os.sched_getaffinity(0)) // tensor_parallel_size)


class ProcessExecutor(ChannelExecutor):
    """`size` ranks as child processes of this one; they die with it."""

    def __init__(
        self,
        *,
        size: int,
        device: str,
        threads_per_rank: int | None = None,
        load_timeout_s: float = 1800.0,
        step_timeout_s: float = 60.0,
    ) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        # A FileStore wants a path that is not there yet; the folder is ours alone.
        self._folder = tempfile.TemporaryDirectory(prefix="plait-")
        rendezvous = f"file://{Path(self._folder.name) / 'rendezvous'}"
        environment = os.environ | rank_environment(threads_per_rank or default_threads(size))
        channels = []
        for rank in range(size):
            ours, theirs = socket.socketpair()
            with theirs:
                self._processes.append(
                    subprocess.Popen(
                        [
                            *(sys.executable, "-m", "plait.worker.rank_process"),
                            *("--fd", str(theirs.fileno())),
                            *("--rank", str(rank)),
                            *("--size", str(size)),
                            *("--device", f"cuda:{rank}" if device == "cuda" else device),
                            *("--rendezvous", rendezvous),
                            *("--timeout-s", str(load_timeout_s)),
                        ],
                        pass_fds=[theirs.fileno()],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                    )
                )
            channels.append(Channel(ours, peer=f"rank {rank}"))
        super().__init__(channels, load_timeout_s=load_timeout_s, step_timeout_s=step_timeout_s)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def allocate(self, request: protocol.Allocate) -> list[protocol.Ready]:
        replies = super().allocate(request)
        self._folder.cleanup()  # every rank is connected: if this process is killed, nothing stays
        return replies

    def describe_exit(self, rank: int) -> str:
        try:
            code = self._processes[rank].wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return ""
        return f" (exit code {code})" if code >= 0 else f" (killed by signal {-code})"

    def kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            process.wait()

    def shutdown(self) -> None:
        super().shutdown()
        self._folder.cleanup()
