"""The Dockerfile fits the repository: it cannot be built where there is no container engine."""

import re
import tomllib

import yaml

from tests.packaging.chart.helm import CHART, ROOT

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()


def argument(name):
    (value,) = re.findall(rf"^ARG {name}=(\S+)$", DOCKERFILE, re.MULTILINE)
    return value


def copied():
    """Paths that are copied out of the repository."""
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        yield from line.split()[:-1]


def test_every_copied_path_exists_and_is_not_ignored():
    assert list(copied())
    for path in copied():
        assert (ROOT / path).exists(), path
        assert f"!{path}" in IGNORED


def test_what_the_wheel_is_built_from_is_copied():
    folders = {"kernels", "worker", "cluster", "deploy"}
    files = {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]}
    assert set(copied()) == folders | files


def test_python_and_extras_are_those_of_the_project():
    minor = int(argument("PYTHON").split(".")[1])
    oldest = int(PROJECT["requires-python"].removeprefix(">=3."))
    assert minor >= oldest
    (extras,) = re.findall(r"plait-\*\.whl\)\[([\w,]+)\]", DOCKERFILE)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_torch_is_that_of_the_makefile():
    assert f"TORCH ?= {argument('TORCH')}\n" in (ROOT / "Makefile").read_text()


def test_ray_is_the_version_that_the_chart_names():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert argument("RAY") == values["image"]["rayVersion"]


def test_the_user_is_the_one_that_pods_run_as():
    assert re.search(r"^USER 1000:1000$", DOCKERFILE, re.MULTILINE)
    pod = (CHART / "templates" / "_pod.tpl").read_text()
    assert "runAsUser: 1000" in pod
    assert "runAsGroup: 1000" in pod


def test_the_version_of_the_chart_is_that_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == PROJECT["version"]
