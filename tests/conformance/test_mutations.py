"""The conformance check can fail: a model broken in any one place does not pass it.

Each mutation breaks one thing that a rank uses. It runs for every architecture that has the thing.
"""

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import transformers
from plait_testing.driver import RankDriver
from plait_testing.logits import assert_same
from plait_testing.models import TINY_MODELS

import plait.worker.layers.mamba2 as mamba2_layer
import plait.worker.rank as rank_module
from plait.cluster.executors.inline import InlineExecutor
from plait.worker.architectures import load_spec
from plait.worker.parameters import rank_parameters
from plait.worker.spec import Attention, LayerSpec, Mamba2, Mlp, ModelSpec, Moe, Parallel

PROMPT, PIECE, NUM_DECODE = 65, 17, 12
SILU_OF_ONE = 1.2784645  # silu(x) = 1 here: a gate of this value lets everything through

Monkeypatch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    """A fault, and whether a model has the thing that it breaks."""

    name: str
    apply: Callable[[Monkeypatch], None]
    concerns: Callable[[ModelSpec], bool]


# Faults in weights


def weight(suffix: str, change: Callable[[torch.Tensor], torch.Tensor], name: str) -> Mutation:
    """Every parameter of this name, whatever its layer, is changed after loading."""

    def apply(monkeypatch: Monkeypatch) -> None:
        load = rank_module.load_parameters

        def broken(*args, **kwargs):
            tensors = load(*args, **kwargs)
            for key, tensor in tensors.items():
                if is_named(key, suffix):
                    tensors[key] = change(tensor)
            return tensors

        monkeypatch.setattr(rank_module, "load_parameters", broken)

    return Mutation(name, apply, lambda spec: any(is_named(key, suffix) for key in names_of(spec)))


def names_of(spec: ModelSpec) -> list[str]:
    return [parameter.name for parameter in rank_parameters(spec, tp=1, rank=0)]


def is_named(key: str, suffix: str) -> bool:
    return key == suffix or key.endswith("." + suffix)


WEIGHTS = [
    weight("mamba2.A_log", lambda t: t + 1, "A_log + 1"),
    weight("mamba2.D", torch.zeros_like, "D ignored"),
    weight("mamba2.dt_bias", torch.zeros_like, "dt bias ignored"),
    weight("mamba2.conv_bias", torch.zeros_like, "conv bias ignored"),
    weight("mamba2.conv", lambda t: t.flip(-1), "conv taps reversed"),
    weight("mamba2.in_proj_bias", torch.zeros_like, "mamba2 in bias ignored"),
    weight("mamba2.out_proj_bias", torch.zeros_like, "mamba2 out bias ignored"),
    weight("attention.qkv_proj_bias", torch.zeros_like, "qkv bias ignored"),
    weight("attention.o_proj_bias", torch.zeros_like, "attention out bias ignored"),
    weight("mlp.in_proj_bias", torch.zeros_like, "mlp in bias ignored"),
    weight("mlp.out_proj_bias", torch.zeros_like, "mlp out bias ignored"),
    weight("moe.router", lambda t: t.flip(0), "experts in another order"),
    weight("layers.0.input_norm", torch.ones_like, "one input norm weight ignored"),
    weight("layers.1.ffn_norm", torch.ones_like, "one ffn norm weight ignored"),
    weight("mamba2.norm", torch.ones_like, "gated norm weight ignored"),
    weight("final_norm", torch.ones_like, "final norm weight ignored"),
]


# Faults in the calls of kernels


def call(
    name: str,
    functions: tuple[str, ...],
    change: Callable[..., dict[str, object]],
    concerns: Callable[[ModelSpec], bool] = lambda spec: spec.has_recurrent_state,
) -> Mutation:
    """`functions` of the Mamba-2 layer get the keywords that `change(*args)` gives, too."""

    def apply(monkeypatch: Monkeypatch) -> None:
        for function in functions:
            whole = getattr(mamba2_layer, function)
            monkeypatch.setattr(mamba2_layer, function, changed(whole))

    def changed(whole):
        return lambda *args, **kwargs: whole(*args, **(kwargs | change(*args, **kwargs)))

    return Mutation(name, apply, concerns)


def from_nothing(*_args, read_slots, **_kwargs) -> dict[str, object]:
    return {"read_slots": torch.zeros_like(read_slots)}


def wrong_groups(_x, _dt, _a, b, *_args, **_kwargs) -> dict[str, object]:
    heads, groups = _x.shape[1], b.shape[1]
    return {"group_of_head": groups - 1 - torch.arange(heads) * groups // heads}


def has_groups(spec: ModelSpec) -> bool:
    return any(layer.mamba2.num_groups > 1 for layer in spec.layers if layer.mamba2)


def ignore_gate(monkeypatch: Monkeypatch) -> None:
    norm = mamba2_layer.rms_norm_gated
    monkeypatch.setattr(
        mamba2_layer,
        "rms_norm_gated",
        lambda y, gate, *args, **kwargs: norm(
            y, torch.full_like(gate, SILU_OF_ONE), *args, **kwargs
        ),
    )
    for function in ("ssd_scan", "selective_state_update"):
        whole = getattr(mamba2_layer, function)
        monkeypatch.setattr(mamba2_layer, function, without_gate(whole))


def without_gate(whole):
    return lambda *args, **kwargs: whole(*args, **(kwargs | {"z": None}))


CALLS = [
    call("conv state not carried into a prefill piece", ("causal_conv1d_prefill",), from_nothing),
    call("conv state not carried into decode", ("causal_conv1d_update",), from_nothing),
    call("ssm state not carried into a prefill piece", ("ssd_scan",), from_nothing),
    call("ssm state not carried into decode", ("selective_state_update",), from_nothing),
    call("group map wrong", ("ssd_scan", "selective_state_update"), wrong_groups, has_groups),
    Mutation("gate ignored", ignore_gate, lambda spec: spec.has_recurrent_state),
]


# Faults in what the spec says


def spec_change(name: str, change: Callable[[ModelSpec], ModelSpec]) -> Mutation:
    """The rank runs another spec than that of the checkpoint."""

    def apply(monkeypatch: Monkeypatch) -> None:
        monkeypatch.setattr(rank_module, "load_spec", lambda path: change(load_spec(path)))

    return Mutation(name, apply, lambda spec: change(spec) != spec)


def every_layer(change: Callable[[object], object]) -> Callable[[ModelSpec], ModelSpec]:
    """`change` is applied to each layer and to each mixer and ffn part in it."""

    def part(value: object) -> object:
        match value:
            case Parallel():
                return Parallel(attention=part(value.attention), mamba2=part(value.mamba2))
            case Moe():
                shared = value.shared and part(value.shared)
                return change(replace(value, shared=shared))
            case None:
                return None
        return change(value)

    def layer(value: LayerSpec) -> LayerSpec:
        return change(replace(value, mixer=part(value.mixer), ffn=part(value.ffn)))

    return lambda spec: replace(spec, layers=tuple(map(layer, spec.layers)))


def only(kind: type, **fields: object) -> Callable[[ModelSpec], ModelSpec]:
    """Every part of `kind` gets these fields."""
    return every_layer(lambda part: replace(part, **fields) if type(part) is kind else part)


SECTIONS = (1.0, 1.0, 1.0, 1.0, 1.0)
MULTIPLIERS = {
    "embedding_multiplier": lambda spec: replace(spec, embedding_multiplier=1.0),
    "logits_multiplier": lambda spec: replace(spec, logits_multiplier=1.0),
    "residual_multiplier": only(LayerSpec, residual_multiplier=1.0),
    "key_multiplier": only(Attention, key_multiplier=1.0),
    "attention.in_multiplier": only(Attention, in_multiplier=1.0),
    "attention.out_multiplier": only(Attention, out_multiplier=1.0),
    "mamba2.in_multiplier": only(Mamba2, in_multiplier=1.0),
    "mamba2.out_multiplier": only(Mamba2, out_multiplier=1.0),
    "section_multipliers": only(Mamba2, section_multipliers=SECTIONS),
    "gate_multiplier": only(Mlp, gate_multiplier=1.0),
    "down_multiplier": only(Mlp, down_multiplier=1.0),
}


def drop_one_section(index: int) -> Callable[[ModelSpec], ModelSpec]:
    def change(part: object) -> object:
        if type(part) is not Mamba2:
            return part
        kept = list(part.section_multipliers)
        kept[index] = 1.0
        return replace(part, section_multipliers=tuple(kept))

    return every_layer(change)


def swap_norm_and_gate(part: object) -> object:
    if type(part) is not Mamba2 or part.norm is None:
        return part
    return replace(part, norm=replace(part.norm, before_gate=not part.norm.before_gate))


def usual_scale(part: object) -> object:
    return replace(part, scale=part.head_dim**-0.5) if type(part) is Attention else part


SPECS = [
    *(spec_change(f"{name} ignored", change) for name, change in MULTIPLIERS.items()),
    *(
        spec_change(f"multiplier of {section} ignored", drop_one_section(index))
        for index, section in enumerate(("z", "x", "B", "C", "dt"))
    ),
    spec_change("rope ignored", only(Attention, rope=None)),
    spec_change("dt limit ignored", only(Mamba2, dt_limit=(0.0, float("inf")))),
    spec_change("norm and gate swapped", every_layer(swap_norm_and_gate)),
    spec_change("attention scale ignored", every_layer(usual_scale)),
    spec_change(
        "one expert less",
        every_layer(
            lambda part: (
                replace(part, experts_per_token=part.experts_per_token - 1)
                if type(part) is Moe
                else part
            )
        ),
    ),
]


@functools.cache
def spec_of(name: str) -> ModelSpec:
    model = TINY_MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        getattr(transformers, model.config_class)(**model.config).save_pretrained(folder)
        return load_spec(folder)


def run(path: str, sequence: list[int]) -> torch.Tensor:
    driver = RankDriver(InlineExecutor(device="cpu"), path)
    return driver.run("alone", sequence, prompt=PROMPT, piece=PIECE)


CASES = [
    pytest.param(name, mutation, id=f"{name}-{mutation.name.replace(' ', '_')}")
    for name in sorted(TINY_MODELS)
    for mutation in (*WEIGHTS, *CALLS, *SPECS)
    if mutation.concerns(spec_of(name))
]


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_whole_model_passes(name, checkpoints, tokens):
    path, oracle = checkpoints(name)
    sequence = tokens[PROMPT][: PROMPT + NUM_DECODE]
    assert_same(run(path, sequence), oracle[PROMPT][: len(sequence)])


@pytest.mark.parametrize(("name", "mutation"), CASES)
def test_broken_model_fails(name, mutation, checkpoints, tokens, monkeypatch):
    path, oracle = checkpoints(name)
    sequence = tokens[PROMPT][: PROMPT + NUM_DECODE]
    mutation.apply(monkeypatch)
    logits = run(path, sequence)
    with pytest.raises(AssertionError, match="largest error"):
        assert_same(logits, oracle[PROMPT][: len(sequence)])


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_every_multiplier_has_a_mutation(name):
    """A multiplier that a tiny model sets is one that some mutation drops, and the other way."""
    spec = spec_of(name)
    dropped = {field for field, change in MULTIPLIERS.items() if change(spec) != spec}
    assert dropped == set(TINY_MODELS[name].multipliers)
