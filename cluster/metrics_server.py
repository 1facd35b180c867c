"""Each process shows its series on a port of its own; an ingress merges those of its node."""

import logging
import urllib.request
from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    disable_created_metrics,
    generate_latest,
    start_http_server,
)
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from plait.cluster.settings import ServeSettings
from plait.worker.errors import ConfigError

logger = logging.getLogger(__name__)
_PROCESS_INFO = "plait_process_info"
_SCRAPE_TIMEOUT_S = 1.0
_EVERY_INTERFACE = ("0.0.0.0", "::")


def serve_metrics(
    registry: CollectorRegistry, settings: ServeSettings, *, role: str, name: str, app_id: str
) -> int:
    """Show `registry` on the first free port of the range; gives that port.

    Raises:
        ConfigError: every port of the range is taken.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]
    Gauge(
        _PROCESS_INFO, "A process of this application", ["app_id", "role", "name"],
        registry=registry,
    ).labels(app_id, role, name).set(1)  # fmt: skip
    for port in _ports(settings):
        try:
            start_http_server(port, addr=settings.host, registry=registry)
        except OSError:
            continue
        logger.info("metrics of %s %s on port %d", role, name, port)
        return port
    raise ConfigError(
        f"no free port for metrics in {settings.metrics_port}.."
        f"{settings.metrics_port + settings.metrics_ports - 1}: "
        "move metrics_port or raise metrics_ports"
    )


def merged_metrics(settings: ServeSettings, *, app_id: str) -> bytes:
    """The series of every process of this application on this node, in text format. Blocks."""
    registry = CollectorRegistry()
    registry.register(_Merged(settings, app_id))
    return generate_latest(registry)


class _Merged(Collector):
    """Scrapes the range of ports and joins families of one name."""

    def __init__(self, settings: ServeSettings, app_id: str) -> None:
        self._settings = settings
        self._app_id = app_id

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for port in _ports(self._settings):
            families = _scrape(_local_host(self._settings), port)
            if not any(_belongs(family, self._app_id) for family in families):
                continue
            for family in families:
                known = merged.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from merged.values()


def _scrape(host: str, port: int) -> list[Metric]:
    try:
        url = f"http://{host}:{port}/metrics"
        with urllib.request.urlopen(url, timeout=_SCRAPE_TIMEOUT_S) as reply:
            return list(text_string_to_metric_families(reply.read().decode()))
    except (OSError, ValueError):
        return []  # nobody there, or somebody else


def _belongs(family: Metric, app_id: str) -> bool:
    return family.name == _PROCESS_INFO and any(
        sample.labels.get("app_id") == app_id for sample in family.samples
    )


def _local_host(settings: ServeSettings) -> str:
    return "127.0.0.1" if settings.host in _EVERY_INTERFACE else settings.host


def _ports(settings: ServeSettings) -> range:
    return range(settings.metrics_port, settings.metrics_port + settings.metrics_ports)
