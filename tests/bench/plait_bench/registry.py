"""The engines: how each is installed, started and named in results."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

Group = Literal["16 bits and more", "8 bits"]
FULL: Final[Group] = "16 bits and more"
EIGHT_BITS: Final[Group] = "8 bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine in one of its ways to run.

    `group` is what it is compared with. `environment` names the virtual environment, None for the
    one that the benchmark runs in. `gguf` is the type of the file that it needs, if it needs one.
    """

    name: str
    module: str
    dtype: str = "bfloat16"
    group: Group = FULL
    environment: str | None = None
    is_plait: bool = False
    is_compiled: bool = False
    quantization: str | None = None
    gguf: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def element_bytes(self) -> int:
        """Of the weights of matrix products in memory."""
        return 4 if self.dtype == "float32" else 2 if self.group == FULL else 1


_VLLM_VARIABLES: Final = MappingProxyType(
    {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "KMP_BLOCKTIME": "0",
    }
)


def _vllm(name: str, dtype: str, *, is_compiled: bool) -> EngineSpec:
    return EngineSpec(
        name=name,
        module="vllm_worker",
        dtype=dtype,
        environment="vllm",
        is_compiled=is_compiled,
        variables=_VLLM_VARIABLES,
    )


def _llama_cpp(name: str, gguf: str, group: Group = FULL) -> EngineSpec:
    return EngineSpec(
        name=name,
        module="llama_cpp_worker",
        dtype=gguf,
        group=group,
        environment="llama-cpp",
        gguf=gguf,
    )


ENGINES: Final[Mapping[str, EngineSpec]] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            EngineSpec(name="plait", module="plait_worker", is_plait=True),
            EngineSpec(name="transformers", module="transformers_worker"),
            EngineSpec(name="transformers-fp32", module="transformers_worker", dtype="float32"),
            _vllm("vllm", "bfloat16", is_compiled=False),
            _vllm("vllm-compiled", "bfloat16", is_compiled=True),
            _vllm("vllm-fp32", "float32", is_compiled=False),
            _vllm("vllm-fp32-compiled", "float32", is_compiled=True),
            _llama_cpp("llama.cpp", "bf16"),
            _llama_cpp("llama.cpp-f16", "f16"),
            EngineSpec(
                name="plait-int8",
                module="plait_worker",
                group=EIGHT_BITS,
                is_plait=True,
                quantization="int8",
            ),
            _llama_cpp("llama.cpp-q8_0", "q8_0", EIGHT_BITS),
        )
    }
)
DEFAULT_ENGINES: Final = tuple(name for name, spec in ENGINES.items() if spec.group == FULL)
INT8_ENGINES: Final = tuple(name for name, spec in ENGINES.items() if spec.group == EIGHT_BITS)
