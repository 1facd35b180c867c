"""The text of a reply does not depend on how its tokens arrive."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.cluster.text import TextStream
from plait.cluster.tokenizer import Tokenizer

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
TOKENIZER = Tokenizer(DEMO_MODEL)
TEXTS = [
    "plain words, and some more",
    "emoji 😀👩‍👩‍👧 flags 🇨🇿🇮🇱 end",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "שלום עולם, מה שלומך היום",
    "水は高きより低きに流れる。你好，世界",
    "a real replacement \ufffd character",
    "\ufffd" * 9,
]
BYTE_IDS = [i for i in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(i)) == 1 and i > 6]
BYTE_OF = {TOKENIZER.token_bytes(i)[0]: i for i in BYTE_IDS}


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def as_bytes(raw):
    """One token per byte: every character is spread as far as it can be."""
    return [BYTE_OF[value] for value in raw]


def run(ids, stop=(), sizes=(1,)):
    stream, deltas, start, turn = TextStream(TOKENIZER, stop), [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        deltas.append(stream.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    deltas.append(stream.finish())
    return deltas, stream


def cut_before(text, stops):
    """`text` up to the stop string that is complete first, the longest if several are."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


token_lists = st.one_of(
    st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60),
    st.lists(st.sampled_from(BYTE_IDS), max_size=60),
    st.binary(max_size=60).map(as_bytes),
    st.text(max_size=30).map(lambda text: as_bytes(text.encode())),
    st.text(max_size=30).map(encode),
    # Broken and whole characters next to each other.
    st.lists(
        st.sampled_from([b"\xff", b"\xf0", b"\x9f", b"\x98\x80", b"\xe2\x82", "😀".encode(), b"a"]),
        max_size=25,
    ).map(lambda parts: as_bytes(b"".join(parts))),
)
push_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def test_every_byte_has_a_token():
    assert len(BYTE_OF) == 256


@settings(max_examples=400, deadline=None)
@given(ids=token_lists, sizes=push_sizes)
@example(ids=as_bytes(b"\xff" * 7 + b"\xf0\x9f\x98\x80"), sizes=[1])
@example(ids=as_bytes(b"\xff\xff\xff\xf0\x9f" + b"\x98\x80a"), sizes=[1])
@example(ids=as_bytes(b"\xe2\x82"), sizes=[1])
def test_joined_deltas_are_the_decoded_tokens(ids, sizes):
    deltas, stream = run(ids, sizes=sizes)
    assert "".join(deltas) == TOKENIZER.decode(ids)
    assert stream.num_chars == len(TOKENIZER.decode(ids))


@st.composite
def tokens_and_stops(draw):
    """Stop strings that occur, nearly occur or do not."""
    ids = draw(token_lists)
    text = TOKENIZER.decode(ids)
    stops = []
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(text) - 1)))
        inside = text[start : start + draw(st.integers(1, 6))]
        stops.append(draw(st.sampled_from([inside or "q", inside + "~", "aab", "zz"])))
    return ids, tuple(stops)


@settings(max_examples=400, deadline=None)
@given(case=tokens_and_stops(), sizes=push_sizes)
@example(case=(as_bytes(b"aaaab"), ("aab",)), sizes=[1])
@example(case=(as_bytes(b"xab cd"), ("ab c", "b")), sizes=[6])
@example(case=(as_bytes(b"xab"), ("b", "ab")), sizes=[1])
def test_text_is_cut_before_the_stop_string_that_is_complete_first(case, sizes):
    ids, stops = case
    text, found = cut_before(TOKENIZER.decode(ids), stops)
    deltas, stream = run(ids, stops, sizes)
    assert "".join(deltas) == text
    assert stream.stopped == found


@settings(max_examples=200, deadline=None)
@given(case=tokens_and_stops())
def test_nothing_of_a_stop_string_leaks_on_the_way(case):
    ids, stops = case
    text, _ = cut_before(TOKENIZER.decode(ids), stops)
    stream, delivered = TextStream(TOKENIZER, stops), ""
    for token_id in ids:
        delivered += stream.push([token_id])
        assert text.startswith(delivered)


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole(text):
    deltas, _ = run(as_bytes(text.encode()))
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)
        # Each character comes with its last byte, not later.
        assert [delta for delta in deltas if delta] == list(text)


def test_a_stop_string_need_not_end_where_a_token_does():
    deltas, stream = run(as_bytes(b"ABCDEFGHIJKL"), ["DEFGHIJ"], [1])
    assert "".join(deltas) == "ABC"
    assert deltas[:3] == ["A", "B", "C"]
    assert stream.stopped == "DEFGHIJ"


def test_held_back_text_is_delivered_at_the_end():
    deltas, stream = run(as_bytes(b"aXY"), ["XYZW"])
    assert deltas == ["a", "", "", "XY"]
    assert stream.stopped is None


def test_held_back_text_is_delivered_once_it_cannot_be_a_stop_string():
    assert run(as_bytes(b"XYXYQ"), ["XYZ"])[0] == ["", "", "XY", "", "XYQ", ""]


def test_nothing_comes_after_a_stop_string():
    stream = TextStream(TOKENIZER, ["b"])
    assert stream.push(as_bytes(b"abc")) == "a"
    assert stream.push(as_bytes(b"def")) == ""
    assert stream.finish() == ""


def test_a_stop_string_can_appear_in_the_flush():
    deltas, stream = run(as_bytes(b"a\xf0\x9f"), ["\ufffd"])
    assert "".join(deltas) == "a"
    assert stream.stopped == "\ufffd"


def test_an_unfinished_character_at_the_end_is_shown():
    assert "".join(run(as_bytes("aé".encode()[:-1]))[0]) == "a\ufffd"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip):
    ids = [1, *encode("hi"), 6, *encode(" you")]
    stream = TextStream(TOKENIZER, skip_special_tokens=skip)
    text = stream.push(ids) + stream.finish()
    assert text == ("hi you" if skip else "<|bos|>hi<|end|> you")


@pytest.mark.parametrize("raw", [b"\xff", b"\xf0\x9f", b"word "])
def test_work_per_token_does_not_grow(raw, monkeypatch):
    tokenizer = Tokenizer(DEMO_MODEL)
    longest, decode = 0, tokenizer.decode

    def watched(ids, skip_special_tokens=True):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", watched)
    stream = TextStream(tokenizer)
    delivered = "".join(stream.push([i]) for i in as_bytes(raw) * 300)
    assert longest <= 12
    assert len(delivered) >= len((raw * 300).decode(errors="replace")) - 4


@pytest.fixture(scope="module")
def spaced(tmp_path_factory):
    """A tokenizer with marked spaces and byte-fallback tokens, as sentencepiece makes them."""
    folder = tmp_path_factory.mktemp("spaced")
    vocab = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256))]
    vocab += [*"▁abcdefghijklmnopqrstuvwxyz", "▁a", "▁b"]
    model = tokenizers.models.BPE(
        {token: i for i, token in enumerate(vocab)},
        [("▁", "a"), ("▁", "b")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return Tokenizer(folder)


def test_an_invalid_run_of_byte_tokens_does_not_hold_the_rest_back(spaced):
    first = spaced.vocab_size - 1
    byte_of = {spaced.token_bytes(i): i for i in range(first, 1, -1)}
    ids = [byte_of[bytes([value])] for value in b"\xff" + b"\x01" * 200]
    stream = TextStream(spaced)
    delivered = stream.push(ids)
    assert len(delivered) >= 201 - 40
    # The whole decode shows nothing but replacements; here the run may recover.
    assert len(delivered + stream.finish()) == len(spaced.decode(ids)) == 201


@pytest.mark.parametrize("text", ["a b c", "a  b", "ahoj 😀 b", "水 a 水水", "b é", ""])
def test_marked_spaces_and_byte_tokens(spaced, text):
    ids = spaced.encode(text, add_special_tokens=False)
    stream = TextStream(spaced)
    deltas = [stream.push([i]) for i in (1, *ids[:1], 1, *ids[1:])] + [stream.finish()]
    assert "".join(deltas) == spaced.decode(ids) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert b"".join(spaced.token_bytes(i) for i in ids) == (" " + text if text else "").encode()
