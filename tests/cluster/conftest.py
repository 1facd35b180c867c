"""A server around a scripted engine, for the tests of the HTTP surface."""

import httpx
import openai
import pytest

from tests.cluster.api_support import ScriptedEngine, serve


@pytest.fixture(scope="module")
def scripted():
    return ScriptedEngine()


@pytest.fixture(scope="module")
def base(scripted):
    with serve(scripted) as address:
        yield address


@pytest.fixture
def engine(scripted, base):
    """The engine behind the server, without a past."""
    scripted.reset()
    return scripted


@pytest.fixture(scope="module")
def http(base):
    with httpx.Client(base_url=base, timeout=20, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def client(base):
    with openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0, timeout=20) as made:
        yield made
