"""A Ray of our own, of which nothing stays behind, or a connection to one that is there."""

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import psutil
import ray

logger = logging.getLogger(__name__)
_MARK = "PLAIT_SERVER"
_SHUTDOWN_LIMIT_S = 10.0


@contextmanager
def ray_session(address: str | None, *, dashboard: bool) -> Iterator[None]:
    """Ray while the body runs: started here, or the cluster at `address`.

    A Ray that was started here is swept up afterwards: whoever was ended first (a supervisor may
    signal the whole process group), no process of it stays.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Every process that Ray starts inherits this, and is found by it.
    mark = os.environ[_MARK] = uuid.uuid4().hex
    try:
        if address is None:
            ray.init(address="local", include_dashboard=dashboard, logging_level="WARNING")
        else:
            ray.init(address=address, logging_level="WARNING")
        yield
    finally:
        # Ray's agents overwrite their environment with a title: these are known by descent.
        children = psutil.Process().children(recursive=True) if address is None else []
        within(_SHUTDOWN_LIMIT_S, ray.shutdown, "Ray's shutdown")
        if address is None:
            _sweep(mark, children)


def within(limit_s: float, action: Callable[[], object], name: str) -> None:
    """Run `action`, but do not wait for it longer than `limit_s`: Ray waits for dead peers."""
    thread = threading.Thread(target=action, name=name, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        logger.warning("%s did not end within %g s", name, limit_s)


def _sweep(mark: str, children: Iterable[psutil.Process]) -> None:
    """End `children` and every process that carries our mark."""
    left = set(children)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(_MARK) == mark:
                left.add(process)
    _, alive = psutil.wait_procs(left, timeout=2.0)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=2.0)
