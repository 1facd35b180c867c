"""Validation of custom resources against the schemas of their definitions."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

from tests.packaging.chart.helm import ROOT, Manifest, skip_or_fail

_INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
# The API server checks these itself.
_OBJECT_KEYS = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {}}


def crd_folder() -> Path:
    """PLAIT_CRD_DIR, else ../shared/crds beside the repository."""
    folder = Path(os.environ.get("PLAIT_CRD_DIR") or ROOT.parent / "shared" / "crds")
    if not folder.is_dir():
        skip_or_fail(f"no schemas of custom resources in {folder}: set PLAIT_CRD_DIR")
    return folder


def errors(manifest: Manifest) -> list[str]:
    """What is wrong with a custom resource; unknown keys are errors."""
    validator = Draft7Validator(_schema(crd_folder(), manifest["apiVersion"], manifest["kind"]))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


@cache
def _schema(folder: Path, api_version: str, kind: str) -> dict[str, Any]:
    group, version = api_version.split("/")
    (path,) = folder.glob(f"{group}_{kind.lower()}s.yaml")
    definition = yaml.safe_load(path.read_text())["spec"]
    (served,) = [v for v in definition["versions"] if v["name"] == version and v["served"]]
    schema = strict(served["schema"]["openAPIV3Schema"])
    return {**schema, "properties": schema["properties"] | _OBJECT_KEYS}


def strict(schema: Any) -> Any:
    """A structural schema as JSON schema that refuses unknown keys."""
    if isinstance(schema, list):
        return [strict(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return _INT_OR_STRING
    made = {
        key: {name: strict(value) for name, value in entry.items()}
        if key == "properties"
        else strict(entry)
        for key, entry in schema.items()
        if key not in ("default", "example")
    }
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if "properties" in schema and not is_open:
        made["additionalProperties"] = False
    return made
