"""Compiling one C file into one shared library, once per source, compiler and instruction set.

The cache folder is PLAIT_NATIVE_CACHE, or `plait/native` under the user's cache folder. A library
found there is used without a compiler, so that an image can build all variants ahead of time
(`python -m plait.kernels.native`). Where the folder cannot be written, a library of any compiler is
taken, and what is missing is built in a folder that lives as long as this process.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from plait.kernels.native.isa import Isa, chosen_isa

CACHE_VARIABLE: Final = "PLAIT_NATIVE_CACHE"
COMPILER_VARIABLE: Final = "CC"

_HEADERS: Final = Path(__file__).parent / "include"
_FLAGS: Final = (
    *("-std=gnu11", "-O3", "-fPIC", "-shared"),
    # Kernels share the threads of torch: its OpenMP library is loaded, none is linked.
    *("-fopenmp", "-nodefaultlibs"),
    # Of what -ffast-math does, only what keeps NaN, infinities and the order of sums.
    *("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
)
_LIBRARIES: Final = ("-lm", "-lgcc", "-lc")
_TIMEOUT_S: Final = 300.0

logger = logging.getLogger(__name__)


class NativeBuildError(RuntimeError):
    """A C kernel is not in the cache and cannot be compiled."""


class _Compiler(NamedTuple):
    """The words that start the compiler, and what stands for its version in names of files."""

    command: tuple[str, ...]
    digest: str


def build(source: Path, isa: Isa) -> Path:
    """The shared library of `source` for `isa`, compiled unless the cache has it.

    Raises:
        NativeBuildError: no compiler, or the compiler's own words.
    """
    stem = f"{source.parent.name}-{isa.name}-{_source_digest(source, isa)}"
    compiler = _compiler()
    found = _find(stem, compiler)
    if found is not None:
        return found
    if compiler is None:
        raise NativeBuildError(
            f"no C compiler runs as {_compiler_name()!r} and {cache_folder()} holds no "
            f"{stem}-*.so; install gcc, name a compiler in {COMPILER_VARIABLE}, or name in "
            f"{CACHE_VARIABLE} a folder that `python -m plait.kernels.native` filled elsewhere"
        )
    target = _build_folder() / f"{stem}-{compiler.digest}.so"
    # The lock spares the ranks of a model from compiling the same file at the same time.
    with (_build_folder() / f"{stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(compiler.command, source, isa, target)
    return target


@cache
def unavailable() -> str:
    """Why this machine cannot run C kernels, in one sentence; empty if it can."""
    source = Path(__file__).with_name("probe.c")
    try:
        ctypes.CDLL(str(build(source, chosen_isa())))
    except (NativeBuildError, OSError) as exc:
        return str(exc)
    return ""


@cache
def cache_folder() -> Path:
    """Where libraries are looked for; created if that is possible."""
    named = os.environ.get(CACHE_VARIABLE)
    folder = Path(named) if named else _user_cache_folder() / "plait" / "native"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _user_cache_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:  # a user without a home
        return Path("/nonexistent")


def is_writable(folder: Path) -> bool:
    """Whether libraries can be put into `folder`."""
    return folder.is_dir() and os.access(folder, os.W_OK)


def _find(stem: str, compiler: _Compiler | None) -> Path | None:
    """A library in the cache: of this compiler, else of any unless this one can add its own."""
    folder = cache_folder()
    if compiler is not None:
        path = folder / f"{stem}-{compiler.digest}.so"
        if path.exists():
            return path
        if is_writable(folder):
            return None
    return min(folder.glob(f"{stem}-*.so"), default=None)


@cache
def _build_folder() -> Path:
    folder = cache_folder()
    if is_writable(folder):
        return folder
    logger.warning("%s cannot be written: C kernels are compiled anew by every process", folder)
    # A predictable name could be taken by others. The folder goes with the process.
    private = tempfile.TemporaryDirectory(prefix="plait-native-")
    _private_folders.append(private)
    return Path(private.name)


_private_folders: list[tempfile.TemporaryDirectory[str]] = []


def _compiler_name() -> str:
    return os.environ.get(COMPILER_VARIABLE) or "gcc"


@cache
def _compiler() -> _Compiler | None:
    """The C compiler, None without one."""
    try:
        command = tuple(shlex.split(_compiler_name()))
        shown = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    version = shown.stdout.partition("\n")[0]
    return _Compiler(command, hashlib.sha256(version.encode()).hexdigest()[:8])


def _source_digest(source: Path, isa: Isa) -> str:
    target = (platform.machine(), _FLAGS, isa.compiler_flags, _LIBRARIES)
    digest = hashlib.sha256(repr(target).encode())
    for file in (source, *sorted(_HEADERS.glob("*.h"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: tuple[str, ...], source: Path, isa: Isa, target: Path) -> None:
    """Compile beside `target` and rename: nobody ever sees half a file."""
    handle, unfinished = tempfile.mkstemp(dir=target.parent, suffix=".part")
    os.close(handle)
    command = [
        *(*compiler, *_FLAGS, *isa.compiler_flags, f"-I{_HEADERS}"),
        *(str(source), "-o", unfinished, *_LIBRARIES),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        if done.returncode:
            raise NativeBuildError(f"{' '.join(command)} failed:\n{done.stderr}")
        os.chmod(unfinished, 0o755)
        os.replace(unfinished, target)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NativeBuildError(f"{' '.join(command)} failed: {exc}") from exc
    finally:
        Path(unfinished).unlink(missing_ok=True)
