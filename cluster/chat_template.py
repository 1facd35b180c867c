"""A checkpoint's chat template: from messages to the text of a prompt.

The environment is the one transformers renders templates in: a sandbox with `raise_exception`,
`strftime_now`, `tojson`, loop controls and the `generation` tag.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plait.cluster.errors import ParameterError, RequestError
from plait.worker.errors import ConfigError

_RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents"})
# What a template can raise over messages that it was not written for.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks what a model wrote and renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template.

    Args:
        source: the template's text.
        special_tokens: names such as `bos_token` and their texts, which templates use.
        origin: where it was read, for messages.
    Raises:
        ConfigError: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as exc:
            raise ConfigError(f"{origin}: the chat template does not compile: {exc}") from exc
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. Keys that hold None are left out; `developer` becomes `system`
        where the template does not mention it.

        Raises:
            RequestError: the template refuses these messages.
        """
        extra = dict(template_kwargs or {})
        for name in _RESERVED & extra.keys():
            raise ParameterError("chat_template_kwargs", f"{name!r} cannot be set here")
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    "tools": None,
                    "documents": None,
                    **extra,
                    "messages": [self._plain(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _RENDER_ERRORS as exc:
            raise RequestError(
                f"the chat template cannot render these messages: {exc}",
                param="messages",
                code="invalid_value",
            ) from exc

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        plain = {key: value for key, value in message.items() if value is not None}
        if plain.get("role") == "developer" and not self._knows_developer:
            plain["role"] = "system"
        return plain


def read_chat_template(
    folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template of a checkpoint folder: `chat_template.jinja`, else `chat_template` of
    `tokenizer_config.json`, a text or a list of named ones, of which `default` counts."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(path.read_text("utf-8"), special_tokens, origin=str(path))
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    origin = str(folder / "tokenizer_config.json")
    return ChatTemplate(source, special_tokens, origin=origin)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # The filter that jinja brings escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
