"""Models, probes, the plan, metrics, and the key that guards some of them."""

import time

import httpx
import openai
import pytest

from plait.cluster.errors import ReplicaError
from tests.cluster.api_support import MODEL, NAME, ScriptedEngine, reached, serve, strict

KEY_HEADER = {"Authorization": "Bearer s3cret"}


def test_models(client):
    assert [entry.id for entry in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).created == MODEL.created
    with pytest.raises(openai.NotFoundError, match="serves 'org/demo'"):
        client.models.retrieve("org/other")


def test_probes_plan_and_metrics(http, engine):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert strict(http.get("/plan").text) == {"digest": "abc", "waste": None}
    metrics = http.get("/metrics")
    assert metrics.content == b"plait_up 1\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize("path", ["/health", "/ready"])
@pytest.mark.parametrize("how", ["no", "hang", "raise"])
def test_probes_say_no_in_time(how, path):
    engine = ScriptedEngine()
    engine.answers_ready, engine.is_hanging = how != "no", how == "hang"
    if how == "raise":
        engine.is_ready = failing
    with serve(engine, probe_timeout_s=0.2) as base:
        start = time.monotonic()
        answer = httpx.get(base + path, trust_env=False)
        assert time.monotonic() - start < 1
        # Unanswered questions do not pile up.
        assert reached(lambda: engine.num_cancelled_probes == (how == "hang"))
    assert answer.status_code == 503
    assert answer.json()["status"] in ("unhealthy", "not ready")


async def failing():
    raise ReplicaError("gone")


def test_keys_guard_the_openai_routes_only():
    with serve(ScriptedEngine(), api_key="s3cret") as base:
        with httpx.Client(base_url=base, trust_env=False) as http:
            for path in ("/health", "/ready", "/plan", "/metrics"):
                assert http.get(path).status_code == 200
            for headers in (
                {}, {"Authorization": "s3cret"}, {"Authorization": "Bearer s3cre"},
                {"Authorization": "Basic s3cret"}, {"Authorization": b"Bearer \xe9"},
            ):  # fmt: skip
                for path in ("/v1/models", f"/v1/models/{NAME}"):
                    check_refused(http.get(path, headers=headers))
                for path in ("/v1/completions", "/v1/chat/completions"):
                    check_refused(http.post(path, headers=headers, content=b"{"))
            assert http.get("/v1/models", headers=KEY_HEADER).status_code == 200
        with openai.OpenAI(base_url=f"{base}/v1", api_key="s3cret", max_retries=0) as client:
            assert client.completions.create(model=NAME, prompt="a").choices


def check_refused(answer):
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_a_default_seed_serves_requests_that_bring_none():
    engine = ScriptedEngine()
    with serve(engine, default_seed=11) as base:
        for more in ({}, {"seed": 12}):
            body = {"model": NAME, "prompt": "a", **more}
            httpx.post(f"{base}/v1/completions", json=body, trust_env=False)
    assert [spec.seed for spec in engine.started] == [11, 12]
