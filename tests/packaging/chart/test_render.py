"""Every values file renders with every helm into manifests that a cluster takes."""

import pytest
from kubernetes_validate import ValidationError, validate

from tests.packaging.chart import crds
from tests.packaging.chart.helm import (
    CHART,
    CI_FILES,
    VERSIONS,
    Manifest,
    one,
    pods,
    refusal,
    run_helm,
    template,
)

KUBERNETES = "1.31"  # any version that the library has
CUSTOM_GROUPS = ("ray.io", "monitoring.coreos.com")

every_render = pytest.mark.parametrize(
    ("version", "ci_file"), [(v, c) for v in VERSIONS for c in CI_FILES]
)


def is_custom(manifest: Manifest) -> bool:
    return manifest["apiVersion"].split("/")[0] in CUSTOM_GROUPS


@pytest.mark.parametrize("version", VERSIONS)
def test_lint_has_nothing_to_say(version):
    done = run_helm(version, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_the_helm_is_of_the_version_that_it_stands_for(version):
    assert run_helm(version, "version", "--short").stdout.startswith(f"v{version[-1]}.")


@every_render
def test_built_in_resources_are_valid(version, ci_file):
    manifests = [m for m in template(version, ci_file) if not is_custom(m)]
    assert manifests
    for manifest in manifests:
        validate(manifest, KUBERNETES, strict=True)


@every_render
def test_pods_are_valid(version, ci_file):
    for role, pod in pods(one(template(version, ci_file), "RayService")).items():
        manifest = {"apiVersion": "v1", "kind": "Pod", **pod}
        manifest["metadata"] = {"name": role, **pod["metadata"]}
        validate(manifest, KUBERNETES, strict=True)


@every_render
def test_custom_resources_are_valid(version, ci_file):
    for manifest in filter(is_custom, template(version, ci_file)):
        assert crds.errors(manifest) == []


@pytest.mark.parametrize("ci_file", CI_FILES)
def test_both_helms_render_the_same(ci_file):
    def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
        return {(m["kind"], m["metadata"]["name"]): m for m in manifests}

    assert by_name(template("helm4", ci_file)) == by_name(template("helm3", ci_file))


def test_the_checks_see_an_unknown_key():
    """The validators above are strict at every depth."""
    (service,) = [m for m in template("helm4", "default") if m["kind"] == "Service"]
    spoiled = {**service, "spec": {**service["spec"], "prots": []}}
    with pytest.raises(ValidationError):
        validate(spoiled, KUBERNETES, strict=True)
    ray_service = one(template("helm4", "default"), "RayService")
    cluster = {**ray_service["spec"]["rayClusterConfig"], "rayVersoin": "2"}
    spec = {**ray_service["spec"], "rayClusterConfig": cluster}
    assert "rayVersoin" in crds.errors({**ray_service, "spec": spec})[0]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("imgae={}", "imgae"),
        ("engine.max_num_seq=4", "max_num_seq"),
        ("engine.load_timeout_s=60", "load_timeout_s"),
        ('server.api_key="secret"', "api_key"),
        ("worker.gpus=4", "gpus"),
        ("monitoring.podMonitor.enable=true", "enable"),
    ],
)
def test_an_unknown_value_is_refused_by_name(version, setting, named):
    assert f"'{named}'" in refusal(version, setting) or named in refusal(version, setting)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["engine.tensor_parallel_size=0"], "tensor_parallel_size"),
        (['engine.kv_cache_dtype="int4"'], "kv_cache_dtype"),
        (['engine.device="auto"'], "device"),
        (['engine.cache_memory="4 pounds"'], "cache_memory"),
        (["loadTimeout=0"], "loadTimeout"),
        (['shm.size="64Mi"'], "at least 512Mi"),
        (["engine.tensor_parallel_size=4", "worker.podsPerReplica=3"], "does not divide"),
        (["server.num_ingress=8"], "server.metrics_ports is 8"),
        (["server.metrics_port=65535"], "beyond port 65535"),
        (['weights.source="claim"'], "weights are mounted at /models"),
        (['weights.source="claim"', 'server.model="/modelsx/a"'], "which is not there"),
        (['weights.source="hostPath"', 'server.model="/models/a"'], "set weights.hostPath"),
        (['weights.source="emptyDir"', 'server.model="/models/a"'], "set weights.emptyDir.command"),
        (['weights.source="existingClaim"', 'server.model="/models/a"'], "weights.existingClaim"),
        (["autoscaling.enabled=true", "autoscaling.minReplicas=9"], "above maxReplicas"),
    ],
)
def test_values_that_cannot_work_are_refused_with_the_reason(version, settings, message):
    assert message in refusal(version, *settings)
