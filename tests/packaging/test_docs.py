"""What the documents say is true."""

import ast
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from plait.cluster.settings import ServeSettings
from plait.deploy.cli import cli
from plait.deploy.supported_models import supported_models_table

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]


def test_table_of_supported_models_is_that_of_the_registry():
    assert supported_models_table() in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_exist(document):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", document.read_text())) <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_flags_exist(document):
    text = document.read_text()
    for command in re.findall(r"^ +plait ([a-z]+)", text, re.MULTILINE):
        assert command in cli.commands
    flags = {"--help"} | {
        flag for command in cli.commands.values() for p in command.params for flag in p.opts
    }
    assert set(re.findall(r"`?(--[a-z][a-z-]+)", text)) <= flags


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_examples_compile(document):
    for code in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        ast.parse(code)


def test_every_flag_has_a_help_text():
    assert all(field.description for field in ServeSettings.model_fields.values())


def test_serve_keeps_the_flag_names_that_users_know():
    text = CliRunner().invoke(cli, ["serve", "--help"]).output
    for flag in (
        *("--tensor-parallel-size", "--device", "--dtype", "--host", "--port", "--max-model-len"),
        *("--max-num-seqs", "--max-num-batched-tokens", "--block-size", "--kv-cache-dtype"),
        *("--mamba-cache-dtype", "--mamba-ssm-cache-dtype", "--cache-memory", "--api-key"),
        *("--gpu-memory-utilization", "--served-model-name", "--num-replicas", "--seed"),
    ):
        assert flag in text
