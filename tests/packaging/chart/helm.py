"""Renders the chart with the helm binaries at hand."""

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm" / "plait"
CI_FILES = sorted(path.stem for path in (CHART / "ci").glob("*.yaml"))
VERSIONS = ("helm4", "helm3")
RELEASE = "test"

Manifest = dict[str, Any]


def skip_or_fail(reason: str) -> None:
    """Skip for want of a tool or file; in CI, where it must be there, fail."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def helm_binary(version: str) -> str:
    """HELM4 or HELM3 of the environment, else what `fetch_helm.py` put into `.cache/helm`."""
    named = os.environ.get(version.upper())
    path = Path(named) if named else ROOT / ".cache" / "helm" / version
    if not path.exists():
        skip_or_fail(f"{path} is missing: run tests/packaging/chart/fetch_helm.py")
    return str(path)


def promtool() -> str:
    """Path of promtool."""
    path = shutil.which("promtool")
    if path is None:
        skip_or_fail("promtool is missing: install Debian's package prometheus")
    assert path is not None
    return path


def run_helm(version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helm_binary(version), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def values_of(ci_file: str) -> dict[str, Any]:
    return yaml.safe_load((CHART / "ci" / f"{ci_file}.yaml").read_text()) or {}


@cache
def template(version: str, ci_file: str, *settings: str, release: str = RELEASE) -> list[Manifest]:
    """The manifests of a values file of `ci/`, with `--set-json` settings on top."""
    extra = [argument for setting in settings for argument in ("--set-json", setting)]
    values = str(CHART / "ci" / f"{ci_file}.yaml")
    done = run_helm(version, "template", release, str(CHART), "--values", values, *extra)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def refusal(version: str, *settings: str) -> str:
    """What helm says about settings that it must refuse."""
    extra = [argument for setting in settings for argument in ("--set-json", setting)]
    done = run_helm(version, "template", RELEASE, str(CHART), *extra)
    assert done.returncode != 0, f"{settings} were taken"
    return done.stderr


def one(manifests: list[Manifest], kind: str, name_end: str = "") -> Manifest:
    """The only manifest of a kind (whose name ends so)."""
    found = [
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and manifest["metadata"]["name"].endswith(name_end)
    ]
    assert len(found) == 1, f"{len(found)} of {kind} *{name_end}"
    return found[0]


def pods(ray_service: Manifest) -> dict[str, Manifest]:
    """The pod templates of a RayService by role."""
    cluster = ray_service["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    return {"head": cluster["headGroupSpec"]["template"], "worker": workers["template"]}


def ray_container(pod: Manifest) -> Manifest:
    (container,) = pod["spec"]["containers"]
    return container


def serve_config(ray_service: Manifest) -> Manifest:
    return yaml.safe_load(ray_service["spec"]["serveConfigV2"])


def application(ray_service: Manifest) -> Manifest:
    (app,) = serve_config(ray_service)["applications"]
    return app


def dashboard() -> Manifest:
    return json.loads((CHART / "files" / "dashboards" / "plait.json").read_text())


def alert_rules() -> list[Manifest]:
    groups = yaml.safe_load((CHART / "files" / "alerts" / "plait.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]
