"""`plait serve`: a local Ray or one that is there, the application, a table when it is ready."""

import contextlib
import json
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, LoggingConfig
from rich.console import Console
from rich.table import Table

from plait.cluster.ingress import served_name
from plait.cluster.plan_report import human_bytes
from plait.cluster.settings import ServeSettings
from plait.deploy.app import build_application, placement_bundles
from plait.deploy.demo import demo_model_path
from plait.deploy.local_ray import ray_session, within
from plait.worker.architectures import load_spec
from plait.worker.errors import PlaitError
from plait.worker.spec import check_tp_size

APPLICATION = "plait"
_POLL_S = 0.2
_PENDING_LIMIT_S = 30.0
_SHUTDOWN_SLACK_S = 10.0
_OUR_ERROR = re.compile(r"^\s*plait\.[\w.]+: ", re.MULTILINE)


class ServerError(PlaitError):
    """The server did not come up."""


def run_server(settings: ServeSettings) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        PlaitError: why it did not come up; nothing is left behind.
    """
    console = Console(stderr=True)
    model_path = str(settings.model or demo_model_path())
    check_tp_size(load_spec(model_path), settings.tensor_parallel_size)
    if settings.ray_address is None:
        _check_port(settings)
    session = ray_session(settings.ray_address, dashboard=settings.dashboard)
    # Ray has signal handlers of its own: ours come before it and after it.
    with _stopped_by_signals(console), session, _stopped_by_signals(console):
        try:
            _deploy(settings)
            with console.status("starting"):
                _wait_until_running(settings, console)
            console.print(_summary(settings, model_path))
            threading.Event().wait()
        finally:
            within(settings.drain_timeout_s + _SHUTDOWN_SLACK_S, _delete, "the drain")
            if settings.ray_address is None:
                within(_SHUTDOWN_SLACK_S, serve.shutdown, "Serve's shutdown")


@contextmanager
def _stopped_by_signals(console: Console) -> Iterator[None]:
    """SIGINT and SIGTERM end the body; while it winds up, more of them change nothing."""

    def stop(*_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt:
        console.print("stopped")


def _deploy(settings: ServeSettings) -> None:
    """Hand the application to Serve, without waiting for it."""
    _check_resources(settings)
    serve.start(http_options=HTTPOptions(host=settings.host, port=settings.port))
    target = serve.RunTarget(
        build_application(settings),
        name=APPLICATION,
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
    )
    serve.run_many(
        [target],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def _delete() -> None:
    """Take the application away once its running requests have ended; shutdown would cut them."""
    with contextlib.suppress(RayServeException):  # Serve has not come up
        serve.delete(APPLICATION)


def _check_port(settings: ServeSettings) -> None:
    """Refuse a port that cannot be listened on before anything is started."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        socket.create_server((settings.host, settings.port), family=family).close()
    except OSError as exc:
        raise ServerError(
            f"cannot listen on {settings.host} port {settings.port}: {exc.strerror or exc}; "
            "choose another --host or --port"
        ) from exc


def _check_resources(settings: ServeSettings) -> None:
    """Refuse what this cluster could never place, instead of waiting for ever."""
    total = ray.cluster_resources()
    bundles = placement_bundles(settings)
    for resource in ("CPU", "GPU"):
        needed = settings.num_replicas * sum(bundle.get(resource, 0.0) for bundle in bundles)
        if needed > total.get(resource, 0.0):
            raise ServerError(
                f"{settings.num_replicas} model copies of {settings.tensor_parallel_size} ranks "
                f"need {needed:g} {resource}, and the cluster has {total.get(resource, 0.0):g}: "
                "lower --num-replicas or --tensor-parallel-size, or add nodes"
            )


def _wait_until_running(settings: ServeSettings, console: Console) -> None:
    """Wait for the application; raises `ServerError` with what Serve says if it fails."""
    start = time.monotonic()
    is_warned = False
    while True:
        application = serve.status().applications.get(APPLICATION)
        if application is not None:
            if application.status == ApplicationStatus.RUNNING:
                return
            if application.status in (
                ApplicationStatus.DEPLOY_FAILED,
                ApplicationStatus.UNHEALTHY,
            ):
                raise ServerError(f"the server did not come up: {_why(application)}")
        elapsed = time.monotonic() - start
        if elapsed > settings.load_timeout_s:
            raise ServerError(f"not ready after {settings.load_timeout_s:g} s of load_timeout_s")
        if elapsed > _PENDING_LIMIT_S and not is_warned and (pending := _pending_groups()):
            is_warned = True
            console.print(
                f"{pending} placement groups wait for resources; free now: "
                f"{ray.available_resources()}"
            )
        time.sleep(_POLL_S)


def _pending_groups() -> int:
    table: dict[str, dict[str, Any]] = ray.util.placement_group_table()
    return sum(group["state"] == "PENDING" for group in table.values())


def _why(application: Any) -> str:  # noqa: ANN401 - ray has no types
    """What Serve says; of a chain of tracebacks only the error of ours at its end."""
    messages = [d.message for d in application.deployments.values() if d.message]
    text = "\n".join([application.message, *messages]).strip()
    ours = list(_OUR_ERROR.finditer(text))
    return text[ours[-1].end() :] if ours else text


def _summary(settings: ServeSettings, model_path: str) -> Table:
    """What runs, in one table."""
    host = "127.0.0.1" if settings.host == "0.0.0.0" else settings.host
    url = f"http://{host}:{settings.port}"
    with urllib.request.urlopen(f"{url}/plan", timeout=10.0) as reply:
        plan = json.load(reply)
    layout = plan["layout"]
    dtypes = layout["dtypes"]
    table = Table(title="plait is ready", show_header=False, title_justify="left")
    name = served_name(settings, model_path)
    table.add_row("model", f"{name} ({layout['architecture']}, {plan['dtype']})")
    table.add_row(
        "ranks",
        f"{settings.num_replicas} x tensor parallel {layout['tensor_parallel_size']}, "
        f"{human_bytes(max(plan['weight_bytes']))} of weights each",
    )
    table.add_row(
        "plan",
        f"{plan['num_pages']} pages of {human_bytes(layout['page_bytes'])}: "
        + ", ".join(f"{k['units_per_page']} {k['name']}" for k in layout["kinds"])
        + f" per page; digest {plan['layout_digest'][:12]}",
    )
    table.add_row("cache", f"KV {dtypes['kv']}, conv {dtypes['conv']}, SSM {dtypes['ssm']}")
    table.add_row(
        "limits", f"{plan['max_model_len']} tokens, {plan['max_num_seqs']} sequences at once"
    )
    table.add_row("kernels", ", ".join(sorted(set(plan["backends"].values()))))
    for note in plan["notes"]:
        table.add_row("note", note)
    table.add_row("API", f"{url}/v1")
    table.add_row("operations", f"{url}/health  /ready  /plan  /metrics")
    return table
