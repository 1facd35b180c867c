"""What is exported is computed from the engine's own tables at scrape time."""

import re
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from plait.cluster.controller import start_model
from plait.cluster.engine import Engine
from plait.cluster.executors.inline import InlineExecutor
from plait.cluster.metrics import EngineCollector, IngressMetrics, LatencyEvents
from plait.cluster.metrics_server import merged_metrics, serve_metrics
from plait.cluster.request import SamplingParams, make_spec
from plait.cluster.settings import EngineSettings, ServeSettings
from plait.deploy.demo import demo_model_path

HEALTH = SimpleNamespace(is_healthy=True, last_step_age_s=0.0)


@pytest.fixture
def engine_and_registry():
    registry = CollectorRegistry()
    executor = InlineExecutor(device="cpu")
    settings = EngineSettings(dtype="float32", max_num_seqs=4, max_model_len=256)
    model = start_model(
        executor, str(demo_model_path()), settings, device="cpu", decodable_vocab_size=1024
    )
    engine = Engine(executor, model, events=LatencyEvents(registry, "r1"))
    registry.register(EngineCollector(engine, HEALTH, replica="r1"))
    return engine, registry


def add(engine: Engine, name: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    engine.add(
        make_spec(
            params,
            request_id=name,
            prompt_token_ids=(1, 3, 20, 21),
            max_tokens=5,
            eos_token_ids=(6,),
        )
    )


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    result = registry.get_sample_value(name, {"replica": "r1", **labels})
    assert result is not None, name
    return result


def test_names_use_underscores_only(engine_and_registry):
    _, registry = engine_and_registry
    IngressMetrics(registry, "i1").answered("/v1/models", 200, 0.1)
    names = set(re.findall(r"^# TYPE (\S+)", generate_latest(registry).decode(), re.MULTILINE))
    assert len(names) > 25
    assert all(re.fullmatch(r"plait_[a-z_]+", name) for name in names)


def test_traffic_is_counted(engine_and_registry):
    engine, registry = engine_and_registry
    free = value(registry, "plait_pages", kind="free")
    for name in ("a", "b"):
        add(engine, name)
    assert value(registry, "plait_waiting_requests") == 2
    engine.step()
    assert value(registry, "plait_running_requests") == 2
    assert value(registry, "plait_used_units", kind="state") == 2
    assert value(registry, "plait_pages", kind="free") < free
    engine.abort("b")
    while engine.has_work:
        engine.step()
    assert value(registry, "plait_running_requests") == 0
    assert value(registry, "plait_pages", kind="free") == free
    assert value(registry, "plait_finished_requests_total", reason="length") == 1
    assert value(registry, "plait_finished_requests_total", reason="abort") == 1
    assert value(registry, "plait_prompt_tokens_total") == 8
    assert value(registry, "plait_generation_tokens_total") == 6
    assert value(registry, "plait_time_to_first_token_seconds_count") == 2
    assert value(registry, "plait_request_seconds_count") == 2
    assert value(registry, "plait_step_seconds_count", phase="prefill") == 1
    assert value(registry, "plait_step_seconds_count", phase="decode") == 4


def test_plan_is_shown(engine_and_registry):
    engine, registry = engine_and_registry
    plan = engine.model.plan
    assert value(registry, "plait_usable_pages") == plan.num_pages - 1
    assert value(registry, "plait_page_bytes") == plan.layout.page_bytes
    assert (
        value(
            registry,
            "plait_plan_info",
            layout_digest=plan.layout.digest[:12],
            block_size="16",
            kv_dtype="float32",
            conv_dtype="float32",
            ssm_dtype="float32",
        )
        == 1
    )


def test_processes_of_one_application_are_merged():
    settings = ServeSettings(metrics_port=29400, metrics_ports=6)
    registries = [CollectorRegistry() for _ in range(3)]
    for index, (registry, app) in enumerate(zip(registries, ("a", "a", "b"), strict=True)):
        IngressMetrics(registry, f"i{index}").overloads.inc(index + 1)
        serve_metrics(registry, settings, role="ingress", name=f"i{index}", app_id=app)
    text = merged_metrics(settings, app_id="a").decode()
    assert 'plait_overloads_total{ingress="i0"} 1.0' in text
    assert 'plait_overloads_total{ingress="i1"} 2.0' in text
    assert "i2" not in text
    assert text.count("# TYPE plait_overloads_total counter") == 1


def test_full_range_of_ports_is_an_error():
    settings = ServeSettings(metrics_port=29500, metrics_ports=2)
    for name in ("x", "y"):
        serve_metrics(CollectorRegistry(), settings, role="ingress", name=name, app_id="a")
    with pytest.raises(Exception, match=r"no free port for metrics in 29500\.\.29501"):
        serve_metrics(CollectorRegistry(), settings, role="ingress", name="z", app_id="a")
