"""The Serve application: two deployments, built once from settings."""

import os
import uuid
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from plait.cluster.executors.ray import RANK_CPUS
from plait.cluster.ingress import Ingress
from plait.cluster.planner import DEFAULT_NUM_SEQS
from plait.cluster.replica import Replica
from plait.cluster.settings import ServeSettings
from plait.cluster.tokenizer import Tokenizer
from plait.deploy.demo import demo_model_path

_FRONT_CPUS = 0.1
_FRONT_MAX_ONGOING = 10_000
_API_KEY_VARIABLE = "PLAIT_API_KEY"


def build(args: dict[str, Any]) -> Application:
    """The application for `args`, the fields of `ServeSettings`; what a RayService imports.

    The key for clients may come in PLAIT_API_KEY, so that it stands in no config.
    """
    key = os.environ.get(_API_KEY_VARIABLE)
    return build_application(ServeSettings.model_validate({"api_key": key} | args))


def build_application(settings: ServeSettings) -> Application:
    """Ingress and replica deployments, bound to each other.

    Call it where Ray runs: `device` auto takes CUDA if the cluster has the GPUs.
    """
    settings = settings.model_copy(update={"device": _device(settings)})
    model_path = str(settings.model or demo_model_path())
    app_id = uuid.uuid4().hex[:12]
    values = settings.model_dump()
    max_num_seqs = settings.max_num_seqs or DEFAULT_NUM_SEQS
    replica = serve.deployment(Replica).options(
        name="replica",
        num_replicas=settings.num_replicas,
        ray_actor_options={"num_cpus": RANK_CPUS},
        placement_group_bundles=placement_bundles(settings),
        placement_group_strategy="PACK",
        max_ongoing_requests=max_num_seqs + settings.max_queued_requests,
        max_queued_requests=max_num_seqs + settings.max_queued_requests,
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
    )
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        num_replicas=settings.num_ingress,
        ray_actor_options={"num_cpus": _FRONT_CPUS},
        max_ongoing_requests=_FRONT_MAX_ONGOING,
        health_check_period_s=5.0,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
    )
    vocab_size = Tokenizer(model_path).vocab_size
    bound = replica.bind(values, model_path, vocab_size, app_id)
    return ingress.bind(bound, values, model_path, app_id)


def placement_bundles(settings: ServeSettings) -> list[dict[str, float]]:
    """One bundle per rank; the replica itself sits in the first."""
    rank = {"CPU": RANK_CPUS} | ({"GPU": 1.0} if _device(settings) == "cuda" else {})
    first = rank | {"CPU": 2 * RANK_CPUS}
    return [first, *(rank for _ in range(settings.tensor_parallel_size - 1))]


def _device(settings: ServeSettings) -> str:
    """Where ranks run: as asked for, else by the GPUs that the cluster has now.

    CUDA that was asked for is not questioned: nodes with GPUs may join later.
    """
    if settings.device != "auto":
        return settings.device
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    return "cuda" if num_gpus >= settings.tensor_parallel_size else "cpu"
