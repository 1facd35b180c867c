"""The settings of an engine and of a server, as one schema.

`LLM(...)` takes them as keywords, `plait serve` as flags, the Helm chart as values; each is made
from these models, so the names and the help are the same everywhere.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from plait.cluster.errors import ParameterError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", re.IGNORECASE)


def parse_bytes(value: object) -> int:
    """Bytes from a number or from a text such as "80GiB", "512 MiB" or "2GB".

    Raises:
        ParameterError: the text is not a size.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _BYTES.fullmatch(str(value))
    if match is None:
        raise ParameterError("memory", f"{value!r} is not a size; write e.g. 80GiB or 512MiB")
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()])


def _bytes_or_none(value: object) -> int | None:
    try:
        return None if value is None else parse_bytes(value)
    except ParameterError as exc:
        raise ValueError(str(exc)) from exc


Bytes = Annotated[int, BeforeValidator(_bytes_or_none)]
CacheDtype = Literal["auto", "float32", "bfloat16", "float16"]


class EngineSettings(BaseModel):
    """How a model is loaded and its cache laid out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor_parallel_size: int = Field(
        1, ge=1, description="ranks that one model copy is split over"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where ranks run; auto takes CUDA devices if there are enough"
    )
    dtype: CacheDtype = Field(
        "auto", description="dtype of weights and activations; auto is that of the checkpoint"
    )
    quantization: Literal["int8"] | None = Field(
        None, description="keep the weights of matrix products as 8-bit integers"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="longest prompt plus output in tokens; default: the model's"
    )
    max_num_seqs: int | None = Field(
        None, ge=1, description="sequences that run at once; default: what fits, up to 256"
    )
    max_num_batched_tokens: int = Field(2048, ge=1, description="tokens of one step at most")
    block_size: int = Field(16, ge=16, description="tokens of a KV block, a multiple of 16")
    kv_cache_dtype: CacheDtype = Field("auto", description="dtype of the KV cache")
    mamba_cache_dtype: CacheDtype = Field("auto", description="dtype of the convolution state")
    mamba_ssm_cache_dtype: CacheDtype = Field(
        "auto", description="dtype of the SSM state; auto is the checkpoint's, else float32"
    )
    mamba_ssm_rounding: Literal["nearest", "stochastic"] = Field(
        "nearest", description="how an SSM state of 16 bits is rounded when it is stored"
    )
    cache_memory: Bytes | None = Field(
        None, description="memory of the state cache per rank, e.g. 4GiB; default on CPU: 1GiB"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a CUDA device that weights and cache may take"
    )
    seed: int | None = Field(None, description="seed of requests that bring none")
    strict: bool = Field(
        False, description="refuse limits that do not fit instead of lowering them"
    )
    debug_poison: bool = Field(False, description="fill free cache memory with NaN")
    threads_per_rank: int | None = Field(
        None, ge=1, description="CPU threads of a rank; default: cores over ranks"
    )
    step_timeout_s: float = Field(
        60.0, gt=0, description="a step that takes longer means that a rank hangs"
    )
    load_timeout_s: float = Field(1800.0, gt=0, description="time for loading and warm-up")


class ServeSettings(EngineSettings):
    """What a server adds: where it listens, how many copies, how it names its model."""

    model: str | None = Field(None, description="checkpoint folder; default: the demo model")
    served_model_name: str | None = Field(
        None, description="name in the API; default: the folder's"
    )
    host: str = Field("127.0.0.1", description="address that HTTP binds to")
    port: int = Field(8000, ge=0, le=65535, description="port of HTTP")
    api_key: str | None = Field(None, description="key that clients must send as a bearer token")
    num_replicas: int = Field(1, ge=1, description="copies of the model")
    num_ingress: int = Field(1, ge=1, description="HTTP front processes")
    max_queued_requests: int = Field(
        256, ge=0, description="requests that may wait in a replica; more get 503"
    )
    queue_timeout_s: float = Field(
        30.0, gt=0, description="how long a request waits for a replica before it gets 503"
    )
    drain_timeout_s: float = Field(
        60.0, gt=0, description="time that running requests get to end before a copy is stopped"
    )
    metrics_port: int = Field(
        9400, ge=1024, le=65535, description="first port of the per-process metrics range"
    )
    metrics_ports: int = Field(16, ge=2, le=256, description="how many ports that range has")
    ray_address: str | None = Field(
        None, description="address of a Ray cluster to join; default: start one here"
    )
    dashboard: bool = Field(False, description="start Ray's dashboard with a local Ray")


def engine_settings(options: Mapping[str, object]) -> EngineSettings:
    """Settings from keywords.

    Raises:
        ParameterError: an unknown name, with the nearest known one, or a value out of range.
    """
    for name in options:
        if name not in EngineSettings.model_fields:
            near = get_close_matches(name, EngineSettings.model_fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ParameterError(name, f"is not an option of the engine{hint}")
    try:
        return EngineSettings.model_validate(dict(options))
    except ValidationError as exc:
        first = exc.errors()[0]
        raise ParameterError(str(first["loc"][0]), first["msg"]) from exc
