"""Keep the chart's schema and its README in step with the settings of the server.

`python -m plait.deploy.chart_schema --write` rewrites the generated parts: `engine` and `server` in
`values.schema.json`, from `ServeSettings`, and the table of values in the README, from the comments
of `values.yaml` and the descriptions of the settings. `--check` only says whether they are current.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from plait.cluster.settings import Bytes, EngineSettings, ServeSettings

# Settings that the chart decides itself, and what takes their place in its values.
OWNED_BY_CHART = {
    "load_timeout_s": "loadTimeout",
    "drain_timeout_s": "drainTimeout",
    "api_key": "apiKey",
    "host": "service",
    "ray_address": "ray",
    "dashboard": "ray",
}
_SIZE = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGTkmgt][Ii]?)?[Bb]?\s*$"}
_BEGIN, _END = "<!-- values: begin -->", "<!-- values: end -->"
_COMMENT = re.compile(r"(?P<indent> *)# -- (?P<text>.+)")
_KEY = re.compile(r"(?P<indent> *)(?P<key>[\w]+):(?P<value>.*)")


def settings_schema(group: str) -> dict[str, Any]:
    """The JSON schema of the values below `engine` or `server`."""
    inherited = set(EngineSettings.model_fields)
    properties: dict[str, Any] = {}
    for name, schema in ServeSettings.model_json_schema()["properties"].items():
        if name in OWNED_BY_CHART or (name in inherited) != (group == "engine"):
            continue
        field = {key: value for key, value in schema.items() if key != "title"}
        if name == "device":
            # `auto` counts the GPUs of the pods that have joined so far: maybe none.
            field |= {"enum": ["cpu", "cuda"], "default": "cuda"}
        if ServeSettings.model_fields[name].annotation == Bytes | None:
            field["anyOf"] = [*field["anyOf"], _SIZE]
        properties[name] = field
    return {"type": "object", "additionalProperties": False, "properties": properties}


def with_settings(schema: dict[str, Any]) -> dict[str, Any]:
    """A values schema with its generated parts made anew."""
    made = {group: settings_schema(group) for group in ("engine", "server")}
    return {**schema, "properties": {**schema["properties"], **made}}


def value_rows(text: str) -> Iterator[tuple[str, str, str]]:
    """Dotted name, default as JSON and description of every commented value."""
    defaults = yaml.safe_load(text)
    path: list[tuple[int, str]] = []
    comment = ""
    for line in text.splitlines():
        if match := _COMMENT.fullmatch(line):
            comment = match["text"]
        elif match := _KEY.fullmatch(line):
            indent = len(match["indent"])
            path = [*[part for part in path if part[0] < indent], (indent, match["key"])]
            if comment:
                names = [name for _, name in path]
                yield ".".join(names), json.dumps(_lookup(defaults, names)), comment
            comment = ""


def _lookup(values: Any, names: list[str]) -> Any:  # noqa: ANN401 - any YAML
    for name in names:
        values = values[name]
    return values


def values_table(text: str) -> str:
    """The Markdown table of all values."""
    rows = list(value_rows(text))
    written = {name for name, _, _ in rows}
    for group in ("engine", "server"):
        for name, schema in settings_schema(group)["properties"].items():
            if f"{group}.{name}" not in written:
                description = schema["description"]
                rows.append((f"{group}.{name}", json.dumps(schema["default"]), description))
    groups = list(dict.fromkeys(name.split(".")[0] for name, _, _ in rows))
    rows.sort(key=lambda row: groups.index(row[0].split(".")[0]))
    lines = ["| value | default | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | `{default}` | {meaning} |" for name, default, meaning in rows]
    return "\n".join(lines)


def generated_files(chart: Path) -> dict[Path, str]:
    """The files that have generated parts, as they should be."""
    schema_path, readme_path = chart / "values.schema.json", chart / "README.md"
    schema = with_settings(json.loads(schema_path.read_text()))
    before, rest = readme_path.read_text().split(_BEGIN)
    after = rest.split(_END)[1]
    table = values_table((chart / "values.yaml").read_text())
    return {
        schema_path: json.dumps(schema, indent=2) + "\n",
        readme_path: f"{before}{_BEGIN}\n{table}\n{_END}{after}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m plait.deploy.chart_schema")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="rewrite the generated parts")
    mode.add_argument("--check", action="store_true", help="fail if they are not current")
    parser.add_argument("--chart", type=Path, default=Path("helm/plait"), help="chart folder")
    arguments = parser.parse_args()
    stale = [
        (path, text)
        for path, text in generated_files(arguments.chart).items()
        if path.read_text() != text
    ]
    for path, text in stale:
        if arguments.write:
            path.write_text(text)
        print(f"{path}: {'rewritten' if arguments.write else 'not current; run with --write'}")
    sys.exit(bool(stale) and arguments.check)


if __name__ == "__main__":
    main()
