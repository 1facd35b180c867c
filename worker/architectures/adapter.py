"""The adapter contract, and the readings of a config that several architectures share."""

from collections.abc import Callable
from dataclasses import dataclass

from plait.worker.config import Config
from plait.worker.spec import Attention, GatedNorm, Mamba2, ModelSpec, Rope

_LAYER_KINDS = {
    "mamba": "mamba2",
    "mamba2": "mamba2",
    "linear_attention": "mamba2",
    "attention": "attention",
    "full_attention": "attention",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """How one architecture is recognised and read."""

    architecture: str
    model_type: str
    mixers: str  # for the table of supported models
    checkpoints: tuple[str, ...]
    build: Callable[[Config], ModelSpec]

    def matches(self, config: Config) -> bool:
        return bool(config.get("model_type") == self.model_type)


def layer_kinds(config: Config, key: str, num_layers: int) -> tuple[str, ...]:
    """The mixer of each layer ("mamba2" or "attention"), from either spelling in use."""
    values = config.get(key)
    if values is None:
        return ("mamba2",) * num_layers
    if not isinstance(values, list) or len(values) != num_layers:
        raise config.error(key, values, f"a list of {num_layers} layer types")
    unknown = [value for value in values if value not in _LAYER_KINDS]
    if unknown:
        raise config.error(key, unknown[0], "layer types out of " + ", ".join(_LAYER_KINDS))
    return tuple(_LAYER_KINDS[value] for value in values)


def rope(config: Config, *, head_dim: int, theta: float, partial: float = 1.0) -> Rope:
    """Rotary settings under the current (`rope_parameters`) or the older keys."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise config.error("rope_type", kind, "'default', the one rope kind known so far")
    theta = float(parameters.get("rope_theta", config.number("rope_theta", theta)))
    partial = float(parameters.get("partial_rotary_factor", partial))
    return Rope(theta=theta, rotary_dim=int(head_dim * partial))


def attention(
    config: Config,
    *,
    rope: Rope | None = None,
    head_dim: int,
    scale: float | None = None,
    in_multiplier: float = 1.0,
    key_multiplier: float = 1.0,
    out_multiplier: float = 1.0,
) -> Attention:
    """Grouped-query attention under the usual keys."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads}")
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        rope=rope,
        bias=config.flag("attention_bias", False),
        in_multiplier=in_multiplier,
        key_multiplier=key_multiplier,
        out_multiplier=out_multiplier,
    )


def attention_head_dim(config: Config) -> int:
    """`head_dim`, else the hidden size over the number of heads."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    return config.integer("head_dim", hidden // heads)


def mamba2(
    config: Config,
    *,
    inner_dim: int,
    norm: GatedNorm | None,
    out_bias: bool,
    in_multiplier: float = 1.0,
    section_multipliers: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0),
    out_multiplier: float = 1.0,
) -> Mamba2:
    """A Mamba-2 mixer under the `mamba_*` keys that hybrid configs share."""
    config.choice("hidden_act", ("silu",), "silu")
    num_heads = config.integer("mamba_n_heads", 128)
    head_dim = config.get("mamba_d_head")
    if head_dim in (None, "auto"):
        head_dim = inner_dim // num_heads
    if head_dim * num_heads != inner_dim:
        raise config.error("mamba_d_head", head_dim, f"{num_heads} heads that make {inner_dim}")
    num_groups = config.integer("mamba_n_groups", 1)
    if num_heads % num_groups:
        raise config.error("mamba_n_groups", num_groups, f"a divisor of {num_heads} heads")
    low, high = config.numbers("time_step_limit", (0.0, float("inf")))
    z, x, b, c, dt = section_multipliers
    return Mamba2(
        num_heads=num_heads,
        head_dim=head_dim,
        state_dim=config.integer("mamba_d_state", 256),
        num_groups=num_groups,
        conv_width=config.integer("mamba_d_conv", 4),
        chunk_size=config.integer("mamba_chunk_size", 256),
        conv_bias=config.flag("mamba_conv_bias", True),
        in_bias=config.flag("mamba_proj_bias", False),
        out_bias=out_bias,
        dt_limit=(low, high),
        norm=norm,
        in_multiplier=in_multiplier,
        section_multipliers=(z, x, b, c, dt),
        out_multiplier=out_multiplier,
    )


def model_dtype(config: Config) -> str:
    """The checkpoint's dtype under either key; bfloat16 where the config does not say."""
    value = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return str(value).removeprefix("torch.")


def ssm_dtype(config: Config) -> str | None:
    """The SSM state dtype that the checkpoint asks for, if its config has such a field."""
    value = config.get("mamba_ssm_cache_dtype") or config.get("mamba_ssm_dtype")
    return None if value in (None, "auto") else str(value).removeprefix("torch.")
