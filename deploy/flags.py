"""Command-line flags made from the settings schema, so that names and help are written once."""

import types
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import click
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Model = TypeVar("_Model", bound=BaseModel)


def settings_flags(
    model: type[BaseModel], *, skip: frozenset[str] = frozenset()
) -> Callable[[_Command], _Command]:
    """Decorator: one flag per field of `model` but those in `skip`. Unset flags come as None."""

    def decorate(command: _Command) -> _Command:
        for name, field in reversed(model.model_fields.items()):
            if name not in skip:
                command = _flag(name, field)(command)
        return command

    return decorate


def settings_from_flags(model: type[_Model], flags: dict[str, Any]) -> _Model:
    """Settings from the flags that were given.

    Raises:
        click.BadParameter: names the flag and what it may be.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return model.model_validate(given)
    except ValidationError as exc:
        first = exc.errors()[0]
        name = str(first["loc"][0])
        message = f"{first['msg']}, not {first.get('input')!r}"
        raise click.BadParameter(message, param_hint=_option(name)) from exc


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _flag(name: str, field: FieldInfo) -> Callable[[_Command], _Command]:
    if field.annotation is bool:
        return click.option(_option(name), is_flag=True, default=None, help=field.description)
    kind, metavar = _click_type(field)
    default = field.get_default()
    text = field.description or ""
    if default is not None:
        text += f" [default: {default}]"
    return click.option(_option(name), type=kind, metavar=metavar, default=None, help=text)


def _click_type(field: FieldInfo) -> tuple[click.ParamType[Any], str | None]:
    """The click type of a field, and how the help shows its value."""
    annotation = field.annotation
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        annotation = next(a for a in typing.get_args(annotation) if a is not types.NoneType)
    if typing.get_origin(annotation) is Literal:
        return click.Choice([str(value) for value in typing.get_args(annotation)]), None
    if typing.get_origin(annotation) is typing.Annotated:
        return click.STRING, "BYTES"
    if annotation is int:
        return click.INT, "N"
    if annotation is float:
        return click.FLOAT, "X"
    return click.STRING, "TEXT"
