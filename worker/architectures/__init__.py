"""Which architectures Plait serves, and how a config.json becomes a `ModelSpec`.

Adding one: write an adapter module with an `ADAPTER`, list it here.
"""

from pathlib import Path

from plait.worker.architectures import bamba, falcon_h1, granite_moe_hybrid, mamba2
from plait.worker.architectures.adapter import Adapter
from plait.worker.config import Config
from plait.worker.errors import ConfigError
from plait.worker.spec import ModelSpec

ADAPTERS: tuple[Adapter, ...] = (
    bamba.ADAPTER,
    falcon_h1.ADAPTER,
    granite_moe_hybrid.ADAPTER,
    mamba2.ADAPTER,
)

_BY_NAME = {adapter.architecture: adapter for adapter in ADAPTERS}


def adapter_for(config: Config) -> Adapter:
    """The adapter of a config, by its `architectures` entry, else by its `model_type`.

    Raises:
        ConfigError: no adapter fits; the message lists those there are.
    """
    names = config.get("architectures") or []
    for name in names:
        if name in _BY_NAME:
            return _BY_NAME[name]
    for adapter in ADAPTERS:
        if not names and adapter.matches(config):
            return adapter
    known = ", ".join(sorted(_BY_NAME))
    found = ", ".join(map(str, names)) or config.get("model_type") or "nothing"
    raise ConfigError(f"{config.path} names {found}, which Plait does not serve. Known: {known}.")


def load_spec(path: str | Path) -> ModelSpec:
    """Read a checkpoint folder (or a config.json) into a `ModelSpec`; no weight is touched.

    Raises:
        ConfigError: an unknown architecture, a missing key or a value that is not supported.
    """
    config = Config.read(path)
    if "quantization_config" in config:
        method = config.get("quantization_config").get("quant_method", "an unnamed method")
        raise ConfigError(
            f"{config.path}: weights quantized with {method} are not supported; "
            "use an unquantized checkpoint"
        )
    return adapter_for(config).build(config)
