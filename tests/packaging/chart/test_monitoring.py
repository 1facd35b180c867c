"""Dashboards and alerts ask for what the server exports."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from prometheus_client import CollectorRegistry

from plait.cluster.metrics import EngineCollector, IngressMetrics, LatencyEvents
from plait.cluster.planner import fit_limits
from plait.cluster.scheduler import Scheduler
from plait.worker.dtypes import CacheDtypes
from plait.worker.plan import CacheLayout, CachePlan, UnitKind
from tests.packaging.chart.helm import (
    CHART,
    ROOT,
    alert_rules,
    dashboard,
    one,
    promtool,
    template,
)
from tests.packaging.chart.promql import alert_values, dashboard_queries, metric_names

QUERIES = sorted({*dashboard_queries(), *alert_values().values()})
ALERTS = CHART / "files" / "alerts" / "plait.yaml"


def idle_engine():
    """An engine that has just started, with one kind of each sort."""
    kinds = tuple(
        UnitKind(
            name=name,
            sections=(),
            unit_bytes=4096 // count - 100,
            stride_bytes=4096 // count,
            units_per_page=count,
        )
        for name, count in (("kv", 4), ("state", 2))
    )
    layout = CacheLayout(
        architecture="Test",
        tensor_parallel_size=1,
        block_size=16,
        dtypes=CacheDtypes(kv="float32", conv="float32", ssm="float32"),
        page_bytes=4096,
        kinds=kinds,
    )
    plan = CachePlan(layout=layout, num_pages=64)
    limits = fit_limits(layout, 64, model_max_len=256)
    scheduler = Scheduler(plan, limits, max_num_batched_tokens=64, chunk_size=16)
    model = SimpleNamespace(plan=plan, limits=limits, backends={"ssd_scan": "torch"})
    return SimpleNamespace(scheduler=scheduler, model=model)


@pytest.fixture(scope="module")
def exported():
    """What a replica and an ingress show before their first request: name -> label sets."""
    registry = CollectorRegistry()
    LatencyEvents(registry, "r")
    health = SimpleNamespace(is_healthy=True, last_step_age_s=0.0)
    registry.register(EngineCollector(idle_engine(), health, replica="r"))
    IngressMetrics(registry, "i")
    series = {}
    for family in registry.collect():
        for sample in family.samples:
            series.setdefault(sample.name, []).append(sample.labels)
    return series


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_series_that_exist_before_the_first_request(exported, query):
    names = metric_names(query)
    assert names
    assert names <= set(exported)


def test_every_exported_metric_is_on_the_dashboard_or_behind_an_alert(exported):
    used = set().union(*(metric_names(query) for query in QUERIES))
    families = {
        name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for name in exported
        if not name.endswith("_created")
    }
    unused = {
        family
        for family in families
        if not used & {family, f"{family}_bucket", f"{family}_sum", f"{family}_count"}
    }
    assert unused == set()


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("sum by (le) (rate(a_bucket{x='1', y=~\"b_c\"}[5m]))", {"a_bucket"}),
        ("a / on (x) group_left (y) clamp_min(b_total, 1e-9) > 0.5", {"a", "b_total"}),
        ("absent(a) or b * 0 and c offset 5m", {"a", "b", "c"}),
        ('label_replace(a, "b", "$1", "c", "d_e")', {"a"}),
    ],
)
def test_metric_names_are_read_out_of_promql(query, names):
    assert metric_names(query) == names


def test_no_query_invents_a_zero():
    for query in QUERIES:
        assert "vector(" not in query


def test_panels_have_their_own_ids_and_do_not_overlap():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_panels_use_the_data_source_that_is_chosen():
    for panel in dashboard()["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["targets"]


@pytest.mark.parametrize("name", ["alerts", "dashboards"])
def test_deploy_shows_the_files_of_the_chart(name):
    link = ROOT / "deploy" / name
    assert link.is_symlink()
    assert not Path(link.readlink()).is_absolute()
    assert link.resolve() == CHART / "files" / name


def test_the_chart_installs_the_files_unchanged():
    manifests = template("helm4", "default")
    text = one(manifests, "ConfigMap", "-dashboard")["data"]["plait.json"]
    assert json.loads(text) == dashboard()
    assert one(manifests, "PrometheusRule")["spec"] == yaml.safe_load(ALERTS.read_text())


def test_every_alert_says_what_and_why():
    for rule in alert_rules():
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["alert"].startswith("Plait")


def test_promtool_takes_the_rules():
    done = subprocess.run(
        [promtool(), "check", "rules", "--lint-fatal", str(ALERTS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should():
    file = Path(__file__).with_name("alerts_test.yaml")
    done = subprocess.run(
        [promtool(), "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
