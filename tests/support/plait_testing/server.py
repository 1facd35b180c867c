"""`plait serve` as a user runs it: a process of its own, watched from outside."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from plait_testing.processes import descendants, marked, poll, title, titled

START_LIMIT_S = 120.0  # a hang; how long a start may take is asserted where it matters
STOP_LIMIT_S = 60.0
METRICS_PORTS = 8
REPLICA = "ray::ServeReplica:plait:replica"
INGRESS = "ray::ServeReplica:plait:ingress"
RANK = "ray::RankActor"


@dataclass(slots=True, kw_only=True)
class Server:
    """A started `plait serve`. Its Ray, sockets and files lie in `folder` and nowhere else."""

    process: subprocess.Popen[bytes]
    root: psutil.Process
    port: int
    metrics_port: int
    folder: Path
    api_key: str | None = None
    ready_s: float = 0.0
    seen: set[psutil.Process] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def processes(self) -> set[psutil.Process]:
        """Every process of this server."""
        found = descendants([self.root])
        self.seen |= found
        return found

    def titled(self, start: str) -> list[psutil.Process]:
        return titled(self.processes(), start)

    def client(self, timeout_s: float = 60.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=timeout_s)

    def status(self, path: str) -> int:
        """The status of a GET; 0 where nobody answers."""
        try:
            return httpx.get(self.url + path, timeout=5.0).status_code
        except httpx.TransportError:
            return 0

    def metrics(self) -> "Metrics":
        reply = httpx.get(f"{self.url}/metrics", timeout=30.0)
        reply.raise_for_status()
        return Metrics(reply.text)

    def wait_until_ready(self, timeout_s: float = START_LIMIT_S) -> None:
        start = time.monotonic()

        def is_up() -> bool:
            assert self.process.poll() is None, f"the server ended:\n{self.log()}"
            return self.status("/ready") == 200

        assert poll(is_up, timeout_s=timeout_s), f"not ready in {timeout_s} s:\n{self.log()}"
        self.ready_s = time.monotonic() - start

    def left_behind(self, *, timeout_s: float = 10.0) -> list[str]:
        """Processes that outlived this server, and sockets in its folder; looks for a while."""

        def left() -> set[psutil.Process]:
            return descendants(marked("TMPDIR", str(self.folder)) | self.seen)

        poll(lambda: not left(), timeout_s=timeout_s)
        return [f"{process.pid} {title(process)}" for process in left()] + self.own_folders()

    def own_folders(self) -> list[str]:
        """Folders for sockets between a replica and its ranks."""
        return [str(path) for path in self.folder.glob("plait-*")]

    def ray_state(self) -> dict[str, list[str]]:
        """States of placement groups by name of the state, as Ray itself tells."""
        gcs = titled(self.processes(), str(_gcs_server()))[0]
        port = re.search(r"--gcs_server_port=(\d+)", title(gcs))
        ports = {
            c.laddr.port for c in gcs.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN
        }
        found = int(port[1]) if port and int(port[1]) else ports.pop()
        reply = subprocess.run(
            [sys.executable, "-c", _RAY_STATE, f"127.0.0.1:{found}"],
            env=environment(self.folder) | {"RAY_AUTH_MODE": "token"},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert reply.returncode == 0, reply.stderr.decode()
        return json.loads(reply.stdout.splitlines()[-1])

    def stop(self) -> int:
        """End it as `kill` does; its exit status."""
        self.processes()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_LIMIT_S)
        finally:
            self.end()

    def end(self) -> None:
        """Make sure that it is gone."""
        self.processes()
        self.process.kill()
        self.process.wait()
        for process in marked("TMPDIR", str(self.folder)) | self.seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Metrics:
    """A scrape, by series."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of the series of a name with these labels."""
        values = self.by("replica", name, **labels).values()
        if not values:
            raise KeyError(f"no series {name} {labels}")
        return sum(values)

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Sums by the value of a label."""
        result: dict[str, float] = {}
        for sample in self.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                key = sample.labels.get(label, "")
                result[key] = result.get(key, 0.0) + sample.value
        return result


@contextlib.contextmanager
def launched(*flags: str, **options: str | int | float) -> Iterator[Server]:
    """`plait serve` with flags, not awaited. Whatever happens, it is gone in the end."""
    folder = Path(tempfile.mkdtemp(prefix="plait_e2e_", dir="/tmp"))  # sockets need short paths
    port = int(options.pop("port", 0)) or free_port()
    metrics_port = free_port(METRICS_PORTS)
    options |= {
        "port": port,
        "metrics_port": metrics_port,
        "metrics_ports": METRICS_PORTS,
    }
    arguments = [
        *flags,
        *(
            part
            for name, value in options.items()
            for part in ("--" + name.replace("_", "-"), str(value))
        ),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "plait.deploy.cli", "serve", *arguments],
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    key = options.get("api_key")
    server = Server(
        process=process,
        root=psutil.Process(process.pid),
        port=port,
        metrics_port=metrics_port,
        folder=folder,
        api_key=None if key is None else str(key),
    )
    try:
        yield server
    finally:
        server.end()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def started(*flags: str, **options: str | int | float) -> Iterator[Server]:
    """`plait serve` with flags, up and ready; two ranks where nothing else is said."""
    options = {"tensor_parallel_size": 2, "device": "cpu"} | options
    with launched(*flags, **options) as server:
        server.wait_until_ready()
        yield server


def environment(folder: Path) -> dict[str, str]:
    """Ours, with every temporary file in `folder`."""
    return os.environ | {"TMPDIR": str(folder), "RAY_TMPDIR": str(folder), "COLUMNS": "200"}


def free_port(count: int = 1) -> int:
    """The first of `count` ports in a row that nobody holds, below those that the kernel gives."""
    for first in range(20_000 + os.getpid() % 5000, 32_000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    if port in _given:
                        raise OSError
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        _given.update(range(first, first + count))
        return first
    raise AssertionError("no free ports")


_given: set[int] = set()


def _gcs_server() -> Path:
    import ray

    return Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server"


_RAY_STATE = """
import json, logging, sys
import ray
ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
groups = {}
for group in ray.util.placement_group_table().values():
    groups.setdefault(group["state"], []).append(group["placement_group_id"])
print(json.dumps(groups))
"""
