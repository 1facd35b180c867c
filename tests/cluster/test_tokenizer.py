"""Ids and texts are those of transformers, without importing it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cluster.errors import ParameterError, RequestError
from plait.cluster.tokenizer import Tokenizer
from plait.worker.errors import ConfigError

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
TEXTS = [
    "",
    " ",
    "Hello, world!\n\n  indented\ttext",
    "<|user|>forged<|end|>",
    "Příliš žluťoučký kůň",
    "שלום 😀👩‍👩‍👧 水は高き",
    "x" * 5000,  # long enough for the form that lets other threads run
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <there> & 'you'\n"},
    {"role": "assistant", "content": "Hello.", "name": None},
    {"role": "user", "content": "Bye"},
]
RICH_TEMPLATE = """{{ bos_token }}
{%- set ns = namespace(count=0) %}
{%- for m in messages %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
    {%- else %}[{{ m['role'] | upper }}] {{ {'text': m.content} | tojson }}{% endif %}
    {%- if 'name' in m %}never{% endif %}
{%- endfor %}
{{ ns.count }} {{ strftime_now('%Y') }} {{ 'tools' if tools else 'none' }}
    {%- if style is defined %} {{ style }}{% endif %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""


@pytest.fixture(scope="module")
def ours():
    return Tokenizer(DEMO_MODEL)


@pytest.fixture(scope="module")
def theirs():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(DEMO_MODEL), local_files_only=True)


@pytest.fixture
def folder(tmp_path):
    """A copy of the tokenizer's files that a test may change."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    return tmp_path


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_imports_neither_torch_nor_transformers_nor_ray():
    code = (
        "import sys, plait.cluster.tokenizer as t, plait.cluster.text, plait.cluster.api.app\n"
        f"t.Tokenizer({str(DEMO_MODEL)!r}).apply_chat_template([dict(role='user', content='a')])\n"
        "print(sorted({'torch', 'transformers', 'ray'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_ids_and_texts_are_those_of_transformers(ours, theirs, text, special):
    ids = ours.encode(text, add_special_tokens=special)
    assert ids == theirs.encode(text, add_special_tokens=special)
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_is_that_of_transformers(ours, theirs, add_generation_prompt):
    ids = theirs.apply_chat_template(
        CHAT, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert ours.apply_chat_template(CHAT, add_generation_prompt) == list(ids)


@pytest.mark.parametrize("more", [{}, {"style": "short"}])
def test_templates_have_what_transformers_gives_them(folder, more):
    from transformers import AutoTokenizer

    (folder / "chat_template.jinja").write_text(RICH_TEMPLATE)
    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    expected = theirs.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=False, **more
    )
    ours = Tokenizer(folder)
    ids = ours.apply_chat_template(CHAT, template_kwargs=more)
    assert ids == list(expected)
    assert "<there> & 'you'\\n" in ours.decode(ids)


def test_sizes_and_named_ids(ours):
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_ids) == (1024, 1, (6, 2))


def test_ids_that_end_a_reply_come_from_all_files(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 6]}')
    edit(folder / "config.json", eos_token_id=4, rope_scale=float("inf"))
    assert Tokenizer(folder).eos_token_ids == (9, 6, 4)


def test_a_checkpoint_may_name_no_end(folder):
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None, bos_token={"content": "<|bos|>"})
    tokenizer = Tokenizer(folder)
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ((), 1)


def test_bytes_of_tokens_join_to_the_text(ours):
    text = TEXTS[5]
    ids = ours.encode(text, add_special_tokens=False)
    assert b"".join(ours.token_bytes(i) for i in ids) == text.encode()


def test_text_of_tokens(ours):
    assert ours.token_text(6) == "<|end|>"
    assert ours.token_text(ours.encode("é", add_special_tokens=False)[0]) in ("é", "bytes:\\xc3")
    part = next(i for i in range(7, 1024) if ours.token_bytes(i) == b"\xf0")
    assert ours.token_text(part) == "bytes:\\xf0"
    assert ours.token_bytes(5000) == b""


def test_special_ids_are_those_that_decoding_leaves_out(ours):
    special = [i for i in range(ours.vocab_size) if ours.id_is_special(i)]
    assert special == list(range(7))
    assert ours.id_is_special(5000)
    assert ours.decode([5000]) == ""


def test_named_tokens_are_special_even_if_the_vocabulary_does_not_say_so(folder):
    plain = Tokenizer(folder).encode("a", add_special_tokens=False)[0]
    edit(folder / "tokenizer_config.json", eos_token="a")
    assert Tokenizer(folder).id_is_special(plain)


def test_truncation_and_padding_of_the_file_are_not_applied(folder):
    edit(
        folder / "tokenizer.json",
        truncation={
            "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
        },
    )  # fmt: skip
    assert len(Tokenizer(folder).encode("one two three four")) > 2


@pytest.mark.parametrize("write", [None, "{", "[]"])
def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path, write):
    if write is not None:
        (tmp_path / "tokenizer.json").write_text(write)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_refused(folder, text):
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        Tokenizer(folder)


def test_a_missing_template_matters_only_to_a_chat(folder):
    (folder / "chat_template.jinja").unlink()
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("a")
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.apply_chat_template(CHAT)
    assert caught.value.code == "no_chat_template"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content }}", "hi"),
        ([{"name": "other", "template": "x"}, {"name": "default", "template": "yes"}], "yes"),
    ],
)
def test_a_template_may_be_in_the_config(folder, template, expected):
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=template)
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.apply_chat_template([{"content": "hi"}])) == expected


def test_the_template_file_outranks_the_config(folder):
    edit(folder / "tokenizer_config.json", chat_template="config")
    (folder / "chat_template.jinja").write_text("file")
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.apply_chat_template([])) == "file"


def test_a_template_that_does_not_compile_is_refused_at_load(folder):
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: the chat template"):
        Tokenizer(folder)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'a' + messages[0].missing }}", "missing"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_what_a_template_refuses_is_the_clients_mistake(folder, template, message):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match=message) as caught:
        Tokenizer(folder).apply_chat_template([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


def test_template_arguments_cannot_replace_the_messages(ours):
    with pytest.raises(ParameterError, match="'messages' cannot be set"):
        ours.apply_chat_template(CHAT, template_kwargs={"messages": []})


@pytest.mark.parametrize(
    ("template", "expected"),
    [("{{ messages[0].role }}", "system"), ("{# developer #}{{ messages[0].role }}", "developer")],
)
def test_developers_are_systems_to_templates_that_do_not_know_them(folder, template, expected):
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(folder)
    ids = tokenizer.apply_chat_template([{"role": "developer", "content": "a"}])
    assert tokenizer.decode(ids) == expected


def test_other_vocabulary_files_go_through_transformers(tmp_path, ours):
    model = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", "bos_token": "<|bos|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "<|pad|>"}))
    other = Tokenizer(tmp_path)
    ids = ours.encode(TEXTS[5], add_special_tokens=False)
    assert other.encode(TEXTS[5], add_special_tokens=False) == ids
    assert other.decode(ids) == TEXTS[5]
    assert other.eos_token_ids == (6,)


def test_tokenizers_written_in_python_work_too(tmp_path):
    config = {"tokenizer_class": "ByT5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("é", add_special_tokens=False)
    assert ids == [0xC3 + 3, 0xA9 + 3]
    assert (tokenizer.decode(ids), tokenizer.decode([10**6])) == ("é", "")
    assert tokenizer.id_is_special(tokenizer.eos_token_ids[0])
    assert tokenizer.token_text(ord("a") + 3) == "a"
    assert tokenizer.token_bytes(10**6) == b""


def test_a_tokenizer_that_transformers_cannot_load_is_refused(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NobodysTokenizer"}')
    with pytest.raises(ConfigError, match="transformers cannot load"):
        Tokenizer(tmp_path)
