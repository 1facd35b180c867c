"""The chart's values are the server's settings, one to one."""

import json

import pytest
import yaml

from plait.cluster.settings import ServeSettings
from plait.deploy.chart_schema import (
    OWNED_BY_CHART,
    generated_files,
    settings_schema,
    value_rows,
)
from tests.packaging.chart.helm import (
    CHART,
    CI_FILES,
    VERSIONS,
    application,
    one,
    template,
    values_of,
)

VALUES = (CHART / "values.yaml").read_text()


def names_of(group):
    return set(settings_schema(group)["properties"])


def test_generated_parts_are_current():
    for path, text in generated_files(CHART).items():
        assert path.read_text() == text, "run: python -m plait.deploy.chart_schema --write"


def test_every_setting_is_a_value_or_decided_by_the_chart():
    assert names_of("engine") | names_of("server") | set(OWNED_BY_CHART) == set(
        ServeSettings.model_fields
    )
    assert not names_of("engine") & names_of("server")
    assert set(OWNED_BY_CHART.values()) <= set(yaml.safe_load(VALUES))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("ci_file", CI_FILES)
def test_rendered_settings_are_those_of_the_values(version, ci_file):
    given, defaults = values_of(ci_file), yaml.safe_load(VALUES)
    expected = {
        **defaults["engine"],
        **defaults["server"],
        **given.get("engine", {}),
        **given.get("server", {}),
        "host": "0.0.0.0",
        "load_timeout_s": given.get("loadTimeout", defaults["loadTimeout"]),
        "drain_timeout_s": given.get("drainTimeout", defaults["drainTimeout"]),
    }
    args = application(one(template(version, ci_file), "RayService"))["args"]
    assert args == expected
    assert ServeSettings(**args) == ServeSettings(**expected)


def test_one_values_file_sets_every_setting():
    given = values_of("everything")
    assert set(given["engine"]) == names_of("engine")
    assert set(given["server"]) == names_of("server")


@pytest.mark.parametrize("name", ["tensor_parallel_size", "port", "num_replicas", "metrics_port"])
def test_defaults_that_the_chart_repeats_are_the_servers(name):
    defaults = yaml.safe_load(VALUES)
    repeated = {**defaults["engine"], **defaults["server"]}
    assert repeated[name] == ServeSettings.model_fields[name].default


def test_every_value_has_a_comment():
    def leaves(values, prefix=""):
        for key, value in values.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict) and value and name not in described:
                yield from leaves(value, f"{name}.")
            else:
                yield name

    described = {name for name, _, _ in value_rows(VALUES)}
    assert set(leaves(yaml.safe_load(VALUES))) == described


def test_one_values_file_sets_every_value():
    def keys(values, prefix=""):
        for key, value in values.items():
            name = f"{prefix}{key}"
            yield name
            if isinstance(value, dict) and name not in described:
                yield from keys(value, f"{name}.")

    described = {name for name, _, _ in value_rows(VALUES)}
    together = set()
    for ci_file in CI_FILES:
        together |= set(keys(values_of(ci_file)))
    assert set(keys(yaml.safe_load(VALUES))) - together == set()


def test_the_schema_is_closed_wherever_values_are_ours():
    schema = json.loads((CHART / "values.schema.json").read_text())
    free = {"requests", "limits", "affinity", "global"}

    def open_objects(node, name):
        if node.get("type") == "object":
            if "properties" in node and node.get("additionalProperties", True) is not False:
                yield name
            if "additionalProperties" not in node and name not in free:
                yield name
        for key, child in node.get("properties", {}).items():
            yield from open_objects(child, key)

    assert list(open_objects(schema, "")) == []


@pytest.mark.parametrize("size", ["4GiB", "512 MiB", "2g", 1024, None])
def test_a_size_is_written_as_on_the_command_line(size):
    text = f"engine.cache_memory={json.dumps(size)}"
    args = application(one(template("helm4", "default", text), "RayService"))["args"]
    assert ServeSettings(**args) == ServeSettings(**{**args, "cache_memory": size})
