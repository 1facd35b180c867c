"""A real Prometheus scrapes the server: every query of ours finds something."""

import contextlib
import json
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from plait_testing.load import Ask, run_load
from plait_testing.processes import poll
from plait_testing.server import METRICS_PORTS, Server, free_port

from tests.packaging.chart.promql import alert_values, dashboard_queries

pytestmark = pytest.mark.ray

MODEL = "demo_model"
JOBS = ("merged", "processes")
ALERTS = Path(__file__).resolve().parents[2] / "deploy" / "alerts" / "plait.yaml"


def binary(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        reason = f"{name} is missing: install Debian's package prometheus"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def get(self, path: str, **parameters: str) -> Any:
        reply = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10.0)
        body = reply.json()
        assert body["status"] == "success", body
        return body["data"]

    def values(self, query: str) -> list[float]:
        result = self.get("query", query=query)
        assert result["resultType"] == "vector"
        return [float(sample["value"][1]) for sample in result["result"]]


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory) -> Iterator[Prometheus]:
    """One that has scraped the merged series and those of each process, under load, for a while."""
    folder = tmp_path_factory.mktemp("prometheus")
    ports = range(server.metrics_port, server.metrics_port + METRICS_PORTS)
    targets = {
        "merged": [f"127.0.0.1:{server.port}"],
        "processes": [f"127.0.0.1:{port}" for port in ports if _answers(port)],
    }
    assert len(targets["processes"]) == 2
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": targets[job]}]} for job in JOBS
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                binary("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        found = Prometheus(f"http://127.0.0.1:{port}")
        assert poll(lambda: _is_up(found), timeout_s=30.0), (folder / "log").read_text()
        for _ in range(3):  # rates need values before and after
            _use(server)
        yield found
    finally:
        process.terminate()
        process.wait(20.0)


def _answers(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/metrics").status_code == 200
    return False


def _is_up(prometheus: Prometheus) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return prometheus.values("count(up == 1)") == [3.0]
    return False


def _use(server: Server) -> None:
    """Some of everything: whole and streamed, refused, left by the client."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 30, "stream": True}
    asks = [
        *[Ask(path="/v1/completions", body=body)] * 4,
        Ask(path="/v1/completions", body=body, leaves_after_events=3),
        Ask(path="/v1/completions", body=body | {"max_tokens": -1}),
        Ask(body={"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}),
    ]
    run_load(server, asks, concurrency=len(asks))


def test_scrapes_without_a_complaint(prometheus):
    targets = prometheus.get("targets")["activeTargets"]
    assert {target["labels"]["job"] for target in targets} == set(JOBS)
    for target in targets:
        assert (target["health"], target["lastError"]) == ("up", "")


@pytest.mark.parametrize("job", JOBS)
def test_every_dashboard_query_has_data(prometheus, job):
    queries = [
        query.replace('job=~".*"', f'job="{job}"').replace("[1m]", "[30s]")
        for query in dashboard_queries()
    ]
    assert len(queries) > 20
    assert "or vector(0)" not in "".join(queries)
    assert [query for query in queries if not _has_data(prometheus, query)] == []


def test_every_alert_value_has_data(prometheus):
    values = alert_values()
    assert len(values) > 5
    assert "or vector(0)" not in "".join(values.values())
    empty = {name: query for name, query in values.items() if not _has_data(prometheus, query)}
    assert empty == {}


def test_alert_rules_are_evaluated_and_silent(prometheus):
    groups = prometheus.get("rules", type="alert")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == set(alert_values())
    assert poll(
        lambda: all(
            rule["health"] == "ok"
            for group in prometheus.get("rules", type="alert")["groups"]
            for rule in group["rules"]
        ),
        timeout_s=10.0,
    ), rules
    firing = [alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"]]
    assert firing == []


def _has_data(prometheus: Prometheus, query: str) -> bool:
    values = prometheus.values(query)
    return bool(values) and not all(math.isnan(value) for value in values)


def test_promtool_finds_nothing_in_the_metrics(server):
    with server.client() as http:
        reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    check = subprocess.run(
        [binary("promtool"), "check", "metrics"],
        input=reply.text,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def test_every_series_is_there_once(server):
    """Also in the merged set: each replica and ingress under its own label."""
    samples = server.metrics().samples
    keys = [(sample.name, json.dumps(sample.labels, sort_keys=True)) for sample in samples]
    assert len(keys) == len(set(keys))
    assert all(":" not in sample.name for sample in samples)
