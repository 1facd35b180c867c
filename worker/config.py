"""Reading a checkpoint's config.json as plain data, with errors that name the key."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plait.worker.errors import ConfigError


class Config:
    """A config.json dictionary whose reads are checked: a wrong type names key and value.

    transformers writes infinity as `{"__float__": "Infinity"}` and others as a bare `Infinity`;
    both are read as a float.
    """

    def __init__(self, values: dict[str, Any], *, path: str = "config.json") -> None:
        self._values = values
        self.path = path

    @classmethod
    def read(cls, path: str | Path) -> "Config":
        """Read `path`, a config.json or a folder that holds one."""
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            values = json.loads(file.read_text(), object_hook=_decode_float)
        except FileNotFoundError as exc:
            raise ConfigError(
                f"no config.json at {path}: give a checkpoint folder or a config.json"
            ) from exc
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as exc:
            raise ConfigError(f"{file} cannot be read as JSON: {exc}") from exc
        if not isinstance(values, dict):
            raise ConfigError(f"{file} must hold a JSON object, not {type(values).__name__}")
        return cls(values, path=str(file))

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get(self, key: str) -> Any:  # noqa: ANN401 - a JSON value
        """The raw value of `key`, None where it is absent."""
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def numbers(self, key: str, default: Sequence[float]) -> tuple[float, ...]:
        """A list of as many numbers as `default` has."""
        value = self._value(key, default)
        if (
            not isinstance(value, list | tuple)
            or len(value) != len(default)
            or not all(isinstance(item, int | float) for item in value)
        ):
            raise self.error(key, value, f"a list of {len(default)} numbers")
        return tuple(float(item) for item in value)

    def choice(
        self, key: str, known: Sequence[str | None], default: str | None = None
    ) -> str | None:
        """A value out of `known`; anything else is refused with that list."""
        value = self._values.get(key, default)
        if value not in known:
            raise self.error(key, value, "one of " + ", ".join(map(repr, known)))
        return value if value is None else str(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids or nothing, as a tuple."""
        value = self._values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) for item in ids):
            raise self.error(key, value, "a token id or a list of them")
        return tuple(ids)

    def error(self, key: str, value: object, expected: str) -> ConfigError:
        """An error for `key` that says what was found and what was expected."""
        found = "is missing" if value is None else f"is {value!r}"
        return ConfigError(f"{self.path}: {key!r} {found}; expected {expected}")

    def _value(self, key: str, default: object) -> Any:  # noqa: ANN401 - a JSON value
        value = self._values.get(key)
        return default if value is None else value


def _decode_float(values: dict[str, Any]) -> Any:  # noqa: ANN401 - a JSON value
    return float(values["__float__"]) if values.keys() == {"__float__"} else values
