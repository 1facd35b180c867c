"""The tokenizer of a checkpoint folder, without torch and, wherever possible, transformers.

`tokenizer.json` is read by the `tokenizers` library. Only a folder that has none is given to
`transformers.AutoTokenizer`, which costs seconds and memory to import.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from plait.cluster.chat_template import read_chat_template
from plait.cluster.errors import RequestError
from plait.worker.errors import ConfigError

_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONG_TEXT = 4096  # characters; from here on encoding lets other threads run


class _Backend(Protocol):
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def token_bytes(self, token_id: int) -> bytes | None: ...

    def token_id(self, token: str) -> int | None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...


class _FastBackend:
    """A `tokenizers.Tokenizer`."""

    def __init__(self, fast: tokenizers.Tokenizer, special_tokens: Sequence[str]) -> None:
        fast.no_truncation()
        fast.no_padding()
        known = [token for token in special_tokens if fast.token_to_id(token) is not None]
        fast.add_special_tokens(known)
        self._fast = fast
        self.vocab_size = max(fast.get_vocab(with_added_tokens=True).values()) + 1
        added = fast.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        kinds = _decoder_kinds(fast)
        self._byte_of = _byte_alphabet() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        self._marks_spaces = bool(kinds & {"Metaspace", "Replace"})

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < _LONG_TEXT:
            return self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        # Only the batch form releases the interpreter lock.
        batch = self._fast.encode_batch([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._fast.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        token = self._fast.id_to_token(token_id)
        if token is None:
            return None
        if self._byte_of is not None:
            values = [self._byte_of.get(char) for char in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode()
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token.replace("\u2581", " ") if self._marks_spaces else token).encode()

    def token_id(self, token: str) -> int | None:
        return self._fast.token_to_id(token)


class _SlowBackend:
    """A transformers tokenizer written in Python."""

    def __init__(self, slow: Any) -> None:  # noqa: ANN401 - transformers has no types
        self._slow = slow
        self.vocab_size = max(slow.get_vocab().values()) + 1
        self.special_ids = frozenset(slow.all_special_ids)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._slow.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [i for i in ids if i < self.vocab_size]
        return str(self._slow.decode(known, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        return self.decode([token_id], False).encode()

    def token_id(self, token: str) -> int | None:
        found: int | None = self._slow.get_vocab().get(token)
        return found


class Tokenizer:
    """Text to ids and back, for one checkpoint.

    Attributes:
        vocab_size: one more than the largest id that has a token.
        bos_token_id: None where the checkpoint names none.
        eos_token_ids: ids that end a reply: those of generation_config.json, config.json and
            the tokenizer together.
    Raises:
        ConfigError: the folder holds no tokenizer that can be read.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        named = _named_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
        self._backend = _load_backend(folder, list(named.values()))
        self._template = read_chat_template(folder, config, named)
        self._folder = folder
        self.vocab_size = self._backend.vocab_size
        self.bos_token_id = self._named_id(named, "bos_token")
        self.eos_token_ids = self._collect_eos(self._named_id(named, "eos_token"))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the tokens that the model expects around it unless told not."""
        return self._backend.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; ids without a token have none."""
        return self._backend.decode(ids, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a conversation.

        Args:
            messages: `role`, `content` (text) and what else the template reads.
            add_generation_prompt: end with the opening of the assistant's turn.
            template_kwargs: more names that the template may read, such as `enable_thinking`.
        Raises:
            RequestError: the checkpoint has no template, or it refuses the messages.
        """
        if self._template is None:
            raise RequestError(
                f"{self._folder.name} has no chat template, so it cannot chat; "
                "use /v1/completions with the whole prompt",
                param="messages",
                code="no_chat_template",
            )
        text = self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )
        return self._backend.encode(text, add_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be part of a character."""
        return self._backend.token_bytes(token_id) or b""

    def token_text(self, token_id: int) -> str:
        """A token as text; one that is not whole characters as `bytes:\\xf0\\x9f`."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in raw)

    def id_is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves an id out: a special token, or none at all."""
        if token_id in self._backend.special_ids:
            return True
        return self._backend.token_bytes(token_id) is None

    def _named_id(self, named: Mapping[str, str], name: str) -> int | None:
        return self._backend.token_id(named[name]) if name in named else None

    def _collect_eos(self, own: int | None) -> tuple[int, ...]:
        found: list[int] = []
        for file in ("generation_config.json", "config.json"):
            ids = _read_json(self._folder / file).get("eos_token_id")
            found += ids if isinstance(ids, list) else [] if ids is None else [ids]
        found += [] if own is None else [own]
        return tuple(dict.fromkeys(int(i) for i in found))


def _load_backend(folder: Path, special_tokens: list[str]) -> _Backend:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            fast = tokenizers.Tokenizer.from_file(str(path))
        except Exception as exc:  # the library raises nothing narrower
            raise ConfigError(f"{path} cannot be read: {exc}") from exc
        return _FastBackend(fast, special_tokens)
    if not any((folder / name).is_file() for name in (*_OTHER_FILES, "tokenizer_config.json")):
        raise ConfigError(
            f"{folder} holds no tokenizer: expected tokenizer.json, or one of "
            f"{', '.join(_OTHER_FILES)}"
        )
    return _load_with_transformers(folder, special_tokens)


def _load_with_transformers(folder: Path, special_tokens: list[str]) -> _Backend:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, ImportError, LookupError, TypeError) as exc:
        raise ConfigError(
            f"{folder} has no tokenizer.json, and transformers cannot load its tokenizer: {exc}"
        ) from exc
    if loaded.is_fast:
        return _FastBackend(loaded.backend_tokenizer, special_tokens)
    return _SlowBackend(loaded)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as exc:
        raise ConfigError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold an object, not {type(value).__name__}")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its kin; older files hold an object instead of the text."""
    named = {}
    for name in _NAMED_TOKENS:
        value = config.get(f"{name}_token")
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[f"{name}_token"] = text
    return named


def _decoder_kinds(fast: tokenizers.Tokenizer) -> frozenset[str]:
    if fast.decoder is None:
        return frozenset()
    state = json.loads(fast.decoder.__getstate__())
    return frozenset(part["type"] for part in (state, *state.get("decoders", ())))


def _byte_alphabet() -> dict[str, int]:
    """The printable characters in which byte-level vocabularies spell the 256 bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in plain]
    alphabet = {chr(value): value for value in plain}
    alphabet.update({chr(256 + i): value for i, value in enumerate(others)})
    return alphabet
