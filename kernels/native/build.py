"""Compiling one C file into one shared library, once per source, compiler and instruction set.

The cache folder is PLAIT_NATIVE_CACHE, or `plait/native` under the user's cache folder, or one that
lives as long as this process. A library found there is used without a compiler, so that an image
can build all variants (`python -m plait.kernels.native`) and leave the compiler out.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

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


def build(source: Path, isa: Isa) -> Path:
    """The shared library of `source` for `isa`, compiled unless the cache has it.

    Raises:
        NativeBuildError: no compiler, or the compiler's own words.
    """
    stem = f"{source.parent.name}-{isa.name}-{_source_digest(source, isa)}"
    compiler = _compiler()
    if compiler is None:
        found = sorted(cache_folder().glob(f"{stem}-*.so"))
        if found:
            return found[0]
        raise NativeBuildError(
            f"no C compiler: {COMPILER_VARIABLE} is {os.environ.get(COMPILER_VARIABLE)!r} and "
            f"there is no gcc; and {cache_folder()} holds no {stem}-*.so"
        )
    path, version = compiler
    target = cache_folder() / f"{stem}-{hashlib.sha256(version.encode()).hexdigest()[:8]}.so"
    if target.exists():
        return target
    # The lock spares the ranks of a model from compiling the same file at the same time.
    with (cache_folder() / f"{stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(path, source, isa, target)
    return target


@cache
def unavailable() -> str:
    """Why this machine cannot run C kernels, in one sentence; empty if it can."""
    source = Path(__file__).with_name("probe.c")
    try:
        build(source, chosen_isa())
    except NativeBuildError as exc:
        return str(exc)
    return ""


@cache
def cache_folder() -> Path:
    """Where libraries are kept; created if missing."""
    named = os.environ.get(CACHE_VARIABLE)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(named) if named else Path(home).expanduser() / "plait" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if writable or (_compiler() is None and folder.is_dir()):
        return folder
    logger.warning("%s cannot be written: C kernels are compiled anew by every process", folder)
    return _private_folder()


def _private_folder() -> Path:
    """A folder that goes with this process; a predictable one could be filled by others."""
    folder = tempfile.TemporaryDirectory(prefix="plait-native-")
    _private_folders.append(folder)
    return Path(folder.name)


_private_folders: list[tempfile.TemporaryDirectory[str]] = []


@cache
def _compiler() -> tuple[str, str] | None:
    """Path and version of the C compiler, None without one."""
    path = shutil.which(os.environ.get(COMPILER_VARIABLE) or "gcc")
    if path is None:
        return None
    try:
        shown = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return path, shown.stdout.partition("\n")[0]


def _source_digest(source: Path, isa: Isa) -> str:
    digest = hashlib.sha256(repr((_FLAGS, isa.compiler_flags)).encode())
    for file in (source, *sorted(_HEADERS.glob("*.h"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, source: Path, isa: Isa, target: Path) -> None:
    """Compile beside `target` and rename: nobody ever sees half a file."""
    handle, unfinished = tempfile.mkstemp(dir=target.parent, suffix=".part")
    os.close(handle)
    command = [
        *(compiler, *_FLAGS, *isa.compiler_flags, f"-I{_HEADERS}"),
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
