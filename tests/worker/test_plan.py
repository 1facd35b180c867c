import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cluster.planner import plan_layout
from plait.worker.architectures import load_spec
from plait.worker.dtypes import CacheDtypes
from plait.worker.errors import PlanError
from plait.worker.plan import (
    ALIGNMENT_BYTES,
    CacheLayout,
    CachePlan,
    Section,
    SectionShape,
    UnitKind,
    align,
    check_layout,
    compare_sections,
    decode_layout,
    digest,
    encode,
    kv_kind_name,
    layout_sections,
    pack_sections,
    rank_sections,
)
from plait.worker.spec import Attention, LayerSpec, Mamba2, ModelSpec, Parallel

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
DTYPES = CacheDtypes(kv="bfloat16", conv="bfloat16", ssm="float32")


def small_layout():
    section = Section(
        layer=0, name="k", dtype="bfloat16", shapes=((1, 16, 8),), offset_bytes=0, num_bytes=256
    )
    state = Section(
        layer=1, name="ssm", dtype="float32", shapes=((2, 8, 8),), offset_bytes=0, num_bytes=512
    )
    return CacheLayout(
        architecture="Test",
        tensor_parallel_size=1,
        block_size=16,
        dtypes=DTYPES,
        page_bytes=512,
        kinds=(
            UnitKind(
                name="kv_window_64",
                sections=(section,),
                unit_bytes=256,
                stride_bytes=256,
                units_per_page=2,
                window=64,
            ),
            UnitKind(
                name="state",
                sections=(state,),
                unit_bytes=512,
                stride_bytes=512,
                units_per_page=1,
            ),
        ),
    )


def leaves(value, path=()):
    """The path of every plain value inside nested lists and dictionaries."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list):
        return [leaf for idx, item in enumerate(value) for leaf in leaves(item, (*path, idx))]
    return [path]


def with_change(value, path):
    """A copy of the JSON `value` in which the value at `path` is another of its type."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for step in path[:-1]:
        inner = inner[step]
    old = inner[path[-1]]
    inner[path[-1]] = 7 if old is None else f"{old}x" if isinstance(old, str) else old + 1
    return copy


def test_the_digest_changes_with_every_single_field():
    layout = small_layout()
    plain = json.loads(encode(layout))
    paths = leaves(plain)
    assert len(paths) == 5 + 2 + 2 * 5 + 2 * 5 + 6  # a leaf each; three dimensions a shape
    digests = {
        digest(msgspec.convert(with_change(plain, path), CacheLayout)): path for path in paths
    }
    assert len(digests) == len(paths)
    assert layout.digest not in digests


def test_the_digest_covers_every_field_of_the_dataclasses():
    plain = json.loads(encode(small_layout()))
    assert set(plain) == set(CacheLayout.__dataclass_fields__)
    assert set(plain["kinds"][0]) == set(UnitKind.__dataclass_fields__)
    assert set(plain["kinds"][0]["sections"][0]) == set(Section.__dataclass_fields__)
    assert set(plain["dtypes"]) == set(CacheDtypes.__dataclass_fields__)


def test_the_order_of_kinds_and_sections_is_part_of_the_digest():
    layout = small_layout()
    assert replace(layout, kinds=layout.kinds[::-1]).digest != layout.digest


def test_the_digest_depends_on_nothing_else():
    # Written down once: it may not depend on the process, its hash seed or its machine.
    assert small_layout().digest == (
        "dcfe71af4139773a771d960acc396e33b8628d17a612bbf13b99672db292dda7"
    )
    assert small_layout().digest == small_layout().digest == digest(small_layout())


def test_a_plan_has_its_own_digest_which_leaves_the_layout_alone():
    layout = small_layout()
    plans = [CachePlan(layout=layout, num_pages=num_pages) for num_pages in (2, 3)]
    assert len({layout.digest, *(plan.digest for plan in plans)}) == 3
    assert {plan.layout.digest for plan in plans} == {layout.digest}
    assert (plans[1].arena_bytes, plans[1].usable_pages) == (3 * 512, 2)


def test_the_encoding_is_canonical_json():
    text = encode(small_layout()).decode()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize("name", ["bamba-9b", "falcon-h1-7b", "mamba-codestral-7b"])
@pytest.mark.parametrize("tp", [1, 4])
def test_layouts_survive_the_wire(name, tp):
    layout = plan_layout(load_spec(CONFIGS / f"{name}.json"), tp=tp, dtypes=DTYPES)
    decoded = decode_layout(encode(layout))
    assert decoded == layout
    assert (decoded.digest, hash(decoded)) == (layout.digest, hash(layout))


def test_kinds_are_found_by_their_role():
    layout = small_layout()
    assert [kind.name for kind in layout.kv_kinds] == ["kv_window_64"]
    assert layout.state_kind is layout.kinds[1]
    assert replace(layout, kinds=layout.kinds[:1]).state_kind is None
    assert (kv_kind_name(None), kv_kind_name(64)) == ("kv", "kv_window_64")


@given(num_bytes=st.integers(0, 1 << 40))
def test_align_gives_the_next_multiple(num_bytes):
    aligned = align(num_bytes)
    assert aligned % ALIGNMENT_BYTES == 0
    assert 0 <= aligned - num_bytes < ALIGNMENT_BYTES


ONE = Attention(num_heads=12, num_kv_heads=3, head_dim=8, scale=1.0)
MAMBA = Mamba2(num_heads=12, head_dim=4, state_dim=8, num_groups=3, conv_width=4)


def model(*mixers):
    return ModelSpec(
        architecture="Test",
        vocab_size=32,
        hidden_dim=16,
        layers=tuple(LayerSpec(mixer=mixer) for mixer in mixers),
        norm_eps=1e-5,
        max_model_len=128,
    )


def sections(spec, tp, **values):
    arguments = {"dtypes": DTYPES, "block_size": 16} | values
    return [rank_sections(spec, tp=tp, rank=rank, **arguments) for rank in range(tp)]


def test_sections_of_a_parallel_layer_name_shape_and_dtype():
    spec = model(MAMBA, Parallel(attention=replace(ONE, window=32), mamba2=MAMBA))
    (found,) = sections(spec, 1, block_size=32)
    assert [(s.kind, s.layer, s.name, s.dtype, s.shape) for s in found] == [
        ("state", 0, "conv", "bfloat16", (3, 48 + 2 * 24)),
        ("state", 0, "ssm", "float32", (12, 4, 8)),
        ("kv_window_32", 1, "k", "bfloat16", (3, 32, 8)),
        ("kv_window_32", 1, "v", "bfloat16", (3, 32, 8)),
        ("state", 1, "conv", "bfloat16", (3, 48 + 2 * 24)),
        ("state", 1, "ssm", "float32", (12, 4, 8)),
    ]


def test_a_section_takes_the_bytes_of_its_largest_rank():
    packed = pack_sections(sections(model(ONE), 4))
    k, v = packed["kv"]
    assert [shape[0] for shape in k.shapes] == [1, 2, 2, 1]
    assert (k.num_bytes, v.offset_bytes) == (2 * 16 * 8 * 2, 2 * 16 * 8 * 2)


@settings(max_examples=50, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 3, 4, 6, 12]),
    layers=st.lists(st.sampled_from(["attention", "mamba", "parallel"]), min_size=1, max_size=5),
    block_size=st.sampled_from([16, 48]),
    ssm=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_packed_sections_are_aligned_and_do_not_overlap(tp, layers, block_size, ssm):
    mixers = {"attention": ONE, "mamba": MAMBA, "parallel": Parallel(attention=ONE, mamba2=MAMBA)}
    ranks = sections(
        model(*(mixers[layer] for layer in layers)),
        tp,
        block_size=block_size,
        dtypes=replace(DTYPES, ssm=ssm),
    )
    packed = pack_sections(ranks)
    assert sum(map(len, packed.values())) == len(ranks[0])
    widths = {"float32": 4, "bfloat16": 2, "float16": 2}
    for placed in packed.values():
        end = 0
        for section in placed:
            assert section.offset_bytes == end
            assert section.offset_bytes % ALIGNMENT_BYTES == 0
            end += section.num_bytes
            for shape in section.shapes:
                numel = 1
                for size in shape:
                    numel *= size
                assert numel * widths[section.dtype] <= section.num_bytes


@pytest.mark.parametrize("tp", [1, 4])
def test_a_layout_agrees_with_the_layers_it_was_made_of(tp):
    spec = model(MAMBA, ONE, Parallel(attention=replace(ONE, window=32), mamba2=MAMBA))
    layout = plan_layout(spec, tp=tp, dtypes=DTYPES)
    for rank, built in enumerate(sections(spec, tp)):
        assert compare_sections(layout_sections(layout, rank=rank), built) == ()


def test_differences_are_reported_field_by_field():
    def shape(layer, name, kind="state", dtype="float32", dims=(2, 3)):
        return SectionShape(kind=kind, layer=layer, name=name, dtype=dtype, shape=dims)

    planned = [shape(0, "ssm"), shape(1, "ssm"), shape(2, "k", kind="kv")]
    built = [shape(0, "ssm", dtype="bfloat16", dims=(2, 4)), shape(1, "ssm"), shape(3, "conv")]
    assert compare_sections(planned, built) == (
        "layer 0 state.ssm: dtype is float32 in the plan, bfloat16 in the built layer",
        "layer 0 state.ssm: shape is (2, 3) in the plan, (2, 4) in the built layer",
        "layer 2 kv.k: in the plan, but not built",
        "layer 3 state.conv: built, but not in the plan",
    )
    assert compare_sections(planned, reversed(planned)) == ()


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        pytest.param(None, {"page_bytes": 500}, "page_bytes=500 is not a multiple", id="page"),
        pytest.param(0, {"units_per_page": 3}, "units do not fill a page exactly", id="count"),
        pytest.param(
            1, {"stride_bytes": 128, "units_per_page": 4}, "stride is not a multiple", id="stride"
        ),
        pytest.param(
            1, {"stride_bytes": 256, "units_per_page": 2}, "sections of 512 bytes", id="overlap"
        ),
        pytest.param(0, {"unit_bytes": 128}, "sections of 256 bytes", id="unit"),
    ],
)
def test_an_unsound_layout_is_refused(kind, values, message):
    layout = small_layout()
    check_layout(layout)
    if kind is None:
        broken = replace(layout, **values)
    else:
        kinds = list(layout.kinds)
        kinds[kind] = replace(kinds[kind], **values)
        broken = replace(layout, kinds=tuple(kinds))
    with pytest.raises(PlanError, match=message):
        check_layout(broken)
