"""Finding processes of a server, and seeing that none is left."""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil


def descendants(roots: Iterable[psutil.Process]) -> set[psutil.Process]:
    """`roots` and all below them that are alive; zombies are not."""
    found: set[psutil.Process] = set()
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {root, *root.children(recursive=True)}
    return {process for process in found if is_alive(process)}


def marked(variable: str, value: str) -> set[psutil.Process]:
    """Every process with this in its environment or in its command line."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(variable) == value or value in title(process):
                found.add(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def title(process: psutil.Process) -> str:
    """The command line, or the title that Ray gave a worker; empty if the process is gone."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def titled(processes: Iterable[psutil.Process], start: str) -> list[psutil.Process]:
    """Those whose title begins with `start`, by process id."""
    found = [process for process in processes if title(process).startswith(start)]
    return sorted(found, key=lambda process: process.pid)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds."""

    rss_bytes: int
    num_files: int
    num_sockets: int

    @classmethod
    def of(cls, process: psutil.Process) -> "Footprint":
        return cls(
            rss_bytes=process.memory_info().rss,
            num_files=process.num_fds(),
            num_sockets=len(process.net_connections(kind="all")),
        )


def poll(condition: Callable[[], object], *, timeout_s: float, period_s: float = 0.1) -> bool:
    """Whether `condition` becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(period_s)
    return True
