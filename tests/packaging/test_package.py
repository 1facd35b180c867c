"""The package holds what the tree holds, and imports nothing heavy or bare where it must not."""

import ast
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("cluster", "deploy", "kernels", "worker")


def test_package_list_equals_the_tree():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        "plait." + ".".join(file.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
    }
    assert sorted(listed) == sorted(found)


def test_kernels_folder_never_becomes_a_package_of_its_own():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_no_source_imports_a_folder_by_its_bare_name():
    bare = []
    for folder in (*FOLDERS, "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom) and node.level == 0
                    else []
                )
                bare += [f"{file}: {name}" for name in names if name.split(".")[0] in FOLDERS]
    assert not bare


def test_published_kernels_package_is_not_installed():
    """With it, transformers tries to reach the hub."""
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import plait.deploy.cli", ("torch", "transformers", "ray")),
        ("import plait.deploy.plan", ("torch", "transformers", "ray")),
        ("import plait.cluster.scheduler, plait.cluster.engine", ("torch", "transformers", "ray")),
        ("import plait.worker.protocol, plait.worker.plan", ("torch", "transformers", "ray")),
        ("import plait.cluster.replica", ("torch", "transformers")),
        ("import plait.cluster.ingress", ("torch", "transformers")),
        ("import plait.worker.rank_process", ("ray", "transformers", "fastapi")),
    ],
)
def test_heavy_libraries_stay_out(statement, absent):
    code = f"{statement}\nimport sys\nprint([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.skipif("CI" not in os.environ, reason="a checkout may run its tests uninstalled")
def test_tests_run_against_the_built_wheel():
    import plait.worker.spec

    assert not Path(plait.worker.spec.__file__).is_relative_to(ROOT / "worker")
    assert "site-packages" in plait.worker.spec.__file__
