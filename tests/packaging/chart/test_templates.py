"""What each template makes of its values, and that its constants agree with each other."""

import pytest
import yaml

from tests.packaging.chart.helm import (
    CI_FILES,
    VERSIONS,
    application,
    one,
    pods,
    ray_container,
    serve_config,
    template,
    values_of,
)

every_render = pytest.mark.parametrize(
    ("version", "ci_file"), [(v, c) for v in VERSIONS for c in CI_FILES]
)
SELECTOR = {"app.kubernetes.io/name": "plait", "app.kubernetes.io/instance": "test"}


def ray_service_of(ci_file, *settings, version="helm4", **options):
    return one(template(version, ci_file, *settings, **options), "RayService")


# Across templates


@every_render
def test_names_are_short_and_labels_agree(version, ci_file):
    for manifest in template(version, ci_file):
        metadata = manifest["metadata"]
        assert len(metadata["name"]) <= 63
        assert metadata["name"][0].isalpha()
        assert metadata["labels"].items() >= SELECTOR.items()
    for role, pod in pods(ray_service_of(ci_file, version=version)).items():
        expected = {**SELECTOR, "app.kubernetes.io/component": role}
        assert pod["metadata"]["labels"].items() >= expected.items()


@pytest.mark.parametrize("release", ["9-lives", "a" * 53, "my-plait", "x"])
def test_kuberay_can_append_to_the_name_of_any_release(release):
    for manifest in template("helm4", "default", release=release):
        name = manifest["metadata"]["name"]
        assert "plait" in name
        assert name[0].isalpha()
    assert len(ray_service_of("default", release=release)["metadata"]["name"]) <= 40


@every_render
def test_selectors_find_the_workers_and_not_the_head(version, ci_file):
    manifests = template(version, ci_file)
    labels = {
        role: pod["metadata"]["labels"] for role, pod in pods(one(manifests, "RayService")).items()
    }
    selectors = [one(manifests, "Service")["spec"]["selector"]]
    selectors += [
        manifest["spec"]["selector"]["matchLabels"]
        for manifest in manifests
        if manifest["kind"] in ("PodMonitor", "PodDisruptionBudget")
    ]
    for selector in selectors:
        assert labels["worker"].items() >= selector.items()
        assert not labels["head"].items() >= selector.items()


@every_render
def test_every_container_is_confined(version, ci_file):
    for pod in pods(ray_service_of(ci_file, version=version)).values():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"] + spec.get("initContainers", []):
            assert container["securityContext"] == {
                "runAsNonRoot": True,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            }


@every_render
def test_one_load_timeout_rules_probes_thresholds_and_engine(version, ci_file):
    ray_service = ray_service_of(ci_file, version=version)
    load_timeout = values_of(ci_file).get("loadTimeout", 1800)
    assert application(ray_service)["args"]["load_timeout_s"] == load_timeout
    spec = ray_service["spec"]
    assert spec["serviceUnhealthySecondThreshold"] >= load_timeout
    assert spec["deploymentUnhealthySecondThreshold"] >= load_timeout
    for pod in pods(ray_service).values():
        container = ray_container(pod)
        startup = container["startupProbe"]
        budget = startup["periodSeconds"] * startup["failureThreshold"]
        assert load_timeout <= budget < load_timeout + startup["periodSeconds"]
        # Liveness needs no delay of its own: it waits for the start-up probe.
        assert "initialDelaySeconds" not in container["livenessProbe"]


@every_render
def test_draining_fits_into_the_time_that_pods_and_old_clusters_get(version, ci_file):
    ray_service = ray_service_of(ci_file, version=version)
    drain = application(ray_service)["args"]["drain_timeout_s"]
    assert drain == values_of(ci_file).get("drainTimeout", 300)
    assert ray_service["spec"]["rayClusterDeletionDelaySeconds"] > drain
    for pod in pods(ray_service).values():
        assert pod["spec"]["terminationGracePeriodSeconds"] > drain


@every_render
def test_metrics_ports_are_the_same_in_settings_pods_and_monitor(version, ci_file):
    manifests = template(version, ci_file)
    ray_service = one(manifests, "RayService")
    args = application(ray_service)["args"]
    ports = ray_container(pods(ray_service)["worker"])["ports"]
    named = {p["name"]: p["containerPort"] for p in ports if p["name"].startswith("metrics-")}
    first = args["metrics_port"]
    assert sorted(named.values()) == list(range(first, first + args["metrics_ports"]))
    for monitor in (m for m in manifests if m["kind"] == "PodMonitor"):
        endpoints = monitor["spec"]["podMetricsEndpoints"]
        assert [endpoint["port"] for endpoint in endpoints] == list(named)


# _pod.tpl


@every_render
def test_shm_is_in_memory_and_holds_the_object_store(version, ci_file):
    ray_service = ray_service_of(ci_file, version=version)
    cluster = ray_service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        spec = group["template"]["spec"]
        (shm,) = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory"
        mounts = ray_container(group["template"])["volumeMounts"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in mounts
        size = shm["emptyDir"]["sizeLimit"]
        unit = {"Mi": 2**20, "Gi": 2**30}[size[-2:]]
        store = int(group["rayStartParams"]["object-store-memory"])
        assert store == int(size[:-2]) * unit // 2


def test_probes_take_their_values():
    settings = ["probes.periodSeconds=7", "probes.readinessFailureThreshold=3"]
    pod = pods(ray_service_of("default", *settings))["worker"]
    readiness = ray_container(pod)["readinessProbe"]
    assert (readiness["periodSeconds"], readiness["failureThreshold"]) == (7, 3)


def test_only_a_workers_readiness_asks_the_proxy():
    found = pods(ray_service_of("default"))
    asked = {
        (role, probe): ray_container(pod)[probe]["httpGet"]["path"]
        for role, pod in found.items()
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert asked.pop(("worker", "readinessProbe")) == "/-/healthz"
    assert set(asked.values()) == {"/api/local_raylet_healthz"}


def test_the_api_key_comes_from_the_secret_and_stands_nowhere_else():
    manifests = template("helm4", "secrets-and-claim")
    expected = {
        "name": "PLAIT_API_KEY",
        "valueFrom": {"secretKeyRef": {"name": "plait-clients", "key": "api-key"}},
    }
    for pod in pods(one(manifests, "RayService")).values():
        assert expected in ray_container(pod)["env"]
    assert "api_key" not in application(one(manifests, "RayService"))["args"]
    assert "api_key" not in one(manifests, "ConfigMap", "plait-test")["data"]["settings.yaml"]
    assert "PLAIT_API_KEY" not in str(ray_service_of("default"))


@pytest.mark.parametrize(
    ("ci_file", "volume"),
    [
        ("gpu-tp4", {"hostPath": {"path": "/srv/models", "type": "Directory"}}),
        ("secrets-and-claim", {"persistentVolumeClaim": {"claimName": "checkpoints"}}),
        ("claim", {"persistentVolumeClaim": {"claimName": "plait-test-weights"}}),
        ("everything", {"emptyDir": {"sizeLimit": "60Gi"}}),
    ],
)
def test_weights_are_mounted_read_only_above_the_model(ci_file, volume):
    ray_service = ray_service_of(ci_file)
    for pod in pods(ray_service).values():
        assert {"name": "weights", **volume} in pod["spec"]["volumes"]
        (mount,) = [m for m in ray_container(pod)["volumeMounts"] if m["name"] == "weights"]
        assert mount["readOnly"]
        assert application(ray_service)["args"]["model"].startswith(mount["mountPath"] + "/")


def test_only_an_init_container_writes_weights():
    pod = pods(ray_service_of("everything"))["worker"]
    (fetch,) = pod["spec"]["initContainers"]
    assert fetch["command"] == ["fetch", "--to", "/weights"]
    assert fetch["volumeMounts"] == [{"name": "weights", "mountPath": "/weights"}]


@pytest.mark.parametrize(("ci_file", "value"), [("default", "1"), ("minimal", "0")])
def test_haproxy_can_be_turned_off(ci_file, value):
    for pod in pods(ray_service_of(ci_file)).values():
        assert {"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": value} in ray_container(pod)["env"]


def test_pods_keep_their_labels_when_only_the_chart_is_new():
    """KubeRay rolls out a new cluster for every change of the pods."""
    labels = pods(ray_service_of("default"))["worker"]["metadata"]["labels"]
    assert "helm.sh/chart" not in labels
    assert "app.kubernetes.io/version" not in labels


# rayservice.yaml, _serve.tpl


@pytest.mark.parametrize(
    ("ci_file", "gpus", "replicas"),
    [("default", 1, (1, 1)), ("gpu-tp4", 4, (1, 1)), ("autoscaling", 4, (4, 16))],
)
def test_workers_have_the_gpus_of_their_ranks(ci_file, gpus, replicas):
    ray_service = ray_service_of(ci_file)
    (group,) = ray_service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert ray_container(group["template"])["resources"]["limits"]["nvidia.com/gpu"] == gpus
    assert (group["minReplicas"], group["maxReplicas"]) == replicas
    assert group["replicas"] == group["minReplicas"]


def test_two_replicas_get_two_workers():
    (group,) = ray_service_of("default", "server.num_replicas=2")["spec"]["rayClusterConfig"][
        "workerGroupSpecs"
    ]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 2)


def test_no_gpu_is_asked_for_on_cpus():
    for pod in pods(ray_service_of("cpu-demo")).values():
        assert "gpu" not in str(ray_container(pod)["resources"])


@pytest.mark.parametrize("ci_file", CI_FILES)
def test_serve_listens_where_the_service_sends(ci_file):
    manifests = template("helm4", ci_file)
    ray_service = one(manifests, "RayService")
    config = serve_config(ray_service)
    ports = ray_container(pods(ray_service)["worker"])["ports"]
    (serve_port,) = [port["containerPort"] for port in ports if port["name"] == "serve"]
    assert config["http_options"] == {"host": "0.0.0.0", "port": serve_port}
    assert config["proxy_location"] == "EveryNode"
    assert application(ray_service)["import_path"] == "plait.deploy.app:build"
    (port,) = one(manifests, "Service")["spec"]["ports"]
    assert port["targetPort"] == "serve"


def test_autoscaling_is_off_unless_asked_for():
    ray_service = ray_service_of("default")
    assert "deployments" not in application(ray_service)
    assert "enableInTreeAutoscaling" not in ray_service["spec"]["rayClusterConfig"]


def test_autoscaling_reaches_serve_and_the_workers():
    ray_service = ray_service_of("autoscaling")
    (deployment,) = application(ray_service)["deployments"]
    assert (deployment["name"], deployment["num_replicas"]) == ("replica", "auto")
    config = deployment["autoscaling_config"]
    assert (config["min_replicas"], config["max_replicas"]) == (2, 8)
    assert ray_service["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"]
    tokens = {
        role: pod["spec"]["automountServiceAccountToken"] for role, pod in pods(ray_service).items()
    }
    assert tokens == {"head": True, "worker": False}  # the autoscaler talks to Kubernetes


@pytest.mark.parametrize(("ci_file", "is_asked"), [("default", True), ("minimal", False)])
def test_ray_asks_for_a_token(ci_file, is_asked):
    cluster = ray_service_of(ci_file)["spec"]["rayClusterConfig"]
    assert (cluster.get("authOptions") == {"mode": "token"}) == is_asked


# The small ones


@pytest.mark.parametrize("ci_file", CI_FILES)
def test_configmap_shows_the_settings_in_force(ci_file):
    manifests = template("helm4", ci_file)
    name = one(manifests, "RayService")["metadata"]["name"]
    shown = one(manifests, "ConfigMap", name)["data"]["settings.yaml"]
    assert yaml.safe_load(shown) == application(one(manifests, "RayService"))["args"]


def test_service_takes_type_port_and_annotations():
    service = one(template("helm4", "everything"), "Service")
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["ports"][0]["port"] == 8000
    assert service["metadata"]["annotations"] == {"example.com/scope": "internal"}


@pytest.mark.parametrize(
    ("ci_file", "name"), [("default", "plait-test"), ("everything", "plait-pods")]
)
def test_pods_run_under_the_service_account_that_is_made(ci_file, name):
    manifests = template("helm4", ci_file)
    account = one(manifests, "ServiceAccount")
    assert account["metadata"]["name"] == name
    assert account["automountServiceAccountToken"] is False
    for pod in pods(one(manifests, "RayService")).values():
        assert pod["spec"]["serviceAccountName"] == name


def test_without_a_service_account_pods_run_under_the_default_one():
    manifests = template("helm4", "minimal")
    assert "ServiceAccount" not in {manifest["kind"] for manifest in manifests}
    for pod in pods(one(manifests, "RayService")).values():
        assert pod["spec"]["serviceAccountName"] == "default"


def test_the_claim_outlives_the_release():
    claim = one(template("helm4", "claim"), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["resources"]["requests"]["storage"] == "300Gi"
    assert claim["spec"]["storageClassName"] == "shared"


def test_disruption_budget_takes_a_percentage():
    budget = one(template("helm4", "everything"), "PodDisruptionBudget")
    assert budget["spec"]["minAvailable"] == "50%"


def test_monitoring_can_be_turned_off():
    kinds = [manifest["kind"] for manifest in template("helm4", "minimal")]
    assert sorted(kinds) == ["ConfigMap", "RayService", "Service"]


def test_monitoring_resources_carry_the_labels_that_find_them():
    manifests = template("helm4", "everything")
    for kind in ("PodMonitor", "PrometheusRule"):
        assert one(manifests, kind)["metadata"]["labels"]["release"] == "prometheus"
    dashboard = one(manifests, "ConfigMap", "-dashboard")
    assert dashboard["metadata"]["labels"]["folder"] == "models"
