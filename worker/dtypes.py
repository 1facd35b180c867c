"""Names and sizes of dtypes, and the one resolver of the cache dtypes."""

from dataclasses import dataclass

from plait.worker.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDtypes:
    """One dtype per sort of cache section."""

    kv: str
    conv: str
    ssm: str


def check_dtype(name: str, *, option: str) -> str:
    """Return `name` if it is a known dtype; raise `ConfigError` naming `option` otherwise."""
    if name not in DTYPE_BYTES:
        known = ", ".join((AUTO, *DTYPE_BYTES))
        raise ConfigError(f"{option}={name!r} is not a known dtype. Known: {known}.")
    return name


def resolve_dtype(requested: str, checkpoint: str) -> str:
    """The dtype of weights and activations: what was asked for, else the checkpoint's."""
    return check_dtype(checkpoint if requested == AUTO else requested, option="dtype")


def resolve_cache_dtypes(
    *,
    model_dtype: str,
    config_ssm_dtype: str | None = None,
    kv: str = AUTO,
    mamba: str = AUTO,
    ssm: str = AUTO,
) -> CacheDtypes:
    """Resolve the cache dtypes: the option, else the checkpoint's config, else a safe default.

    `auto` for the SSM state is float32 unless the config asks for something else, since a 16-bit
    state drifts; conv state and KV follow the model.
    """
    return CacheDtypes(
        kv=check_dtype(model_dtype if kv == AUTO else kv, option="kv_cache_dtype"),
        conv=check_dtype(model_dtype if mamba == AUTO else mamba, option="mamba_cache_dtype"),
        ssm=check_dtype(
            (config_ssm_dtype or "float32") if ssm == AUTO else ssm,
            option="mamba_ssm_cache_dtype",
        ),
    )
