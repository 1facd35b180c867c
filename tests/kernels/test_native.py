"""C kernels: how they are built and found, and the functions that they share."""

import logging
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plait.kernels import dispatch, native
from plait.kernels.errors import BackendError
from plait.kernels.native import ISAS, Isa, NativeBuildError, NativeLibrary, build, isa, library
from plait.kernels.silu_and_mul import native as silu_and_mul
from tests.kernels.conftest import NATIVE_VARIANTS, forget_choices

CPU = torch.device("cpu")
PACKAGE = Path(native.__file__).parents[2]
KERNELS = PACKAGE / "kernels"
SOURCES = [*sorted(PACKAGE.glob("*/*/native.c")), KERNELS / "native" / "probe.c"]
RUNNABLE = list(dict.fromkeys(variant for variant, _ in NATIVE_VARIANTS))
PORTABLE = ISAS["portable"]

ANSWER = '#include "plait.h"\nEXPORT int64_t answer(void) { return %d; }\n'


def forget():
    """Make the build machinery and dispatch look at the environment anew."""
    cached = (build._compiler, build.cache_folder, build._build_folder, build.unavailable)
    for function in (*cached, isa.chosen_isa, isa._cpu_flags, dispatch._warn_without_native):
        function.cache_clear()
    forget_choices()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no other settings of the environment."""
    for name in (dispatch.BACKEND_VARIABLE, isa.ISA_VARIABLE, build.COMPILER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    # Libraries that earlier tests loaded would hide what is in the folder.
    monkeypatch.setattr(silu_and_mul.library, "_loaded", {})
    forget()
    yield tmp_path / "cache"
    monkeypatch.undo()
    forget()


@pytest.fixture
def source(tmp_path):
    (tmp_path / "op").mkdir()
    path = tmp_path / "op" / "native.c"
    path.write_text(ANSWER % 42)
    return path


class Compiler:
    """A shell script that stands for gcc, and counts what it compiles.

    `script` runs instead of gcc: $output is the file to write, $@ the arguments of gcc.
    """

    def __init__(self, folder, monkeypatch):
        self._path = folder / "cc"
        self._log = folder / "compiled"
        self._log.touch()
        self._monkeypatch = monkeypatch
        self.becomes()

    def becomes(self, script='gcc "$@"', version="fake 1.0"):
        self._path.write_text(
            f"""#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit; fi
echo "$@" >> {self._log}
for argument; do
    [ "$previous" = -o ] && output=$argument
    previous=$argument
done
{script}
"""
        )
        self._path.chmod(0o755)
        self._monkeypatch.setenv(build.COMPILER_VARIABLE, str(self._path))
        forget()

    def is_missing(self):
        self._monkeypatch.setenv(build.COMPILER_VARIABLE, "no-such-compiler")
        forget()

    @property
    def num_compiled(self):
        return len(self._log.read_text().splitlines())


@pytest.fixture
def compiler(tmp_path, monkeypatch, cache):
    return Compiler(tmp_path, monkeypatch)


def answer(source):
    return NativeLibrary(source, counting=("answer",), answer="").load().answer()


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


class TestCache:
    def test_a_library_is_compiled_once(self, compiler, cache, source):
        path = build.build(source, PORTABLE)
        assert path.parent == cache
        assert path.name.startswith("op-portable-")
        forget()
        assert build.build(source, PORTABLE) == path
        assert compiler.num_compiled == 1
        assert files(cache) == [path.name]
        assert answer(source) == 42

    def test_another_source_is_another_library(self, compiler, source):
        path = build.build(source, PORTABLE)
        source.write_text(ANSWER % 43)
        assert build.build(source, PORTABLE) != path
        assert answer(source) == 43

    def test_another_header_is_another_library(self, compiler, source, tmp_path, monkeypatch):
        path = build.build(source, PORTABLE)
        headers = tmp_path / "include"
        shutil.copytree(build._HEADERS, headers)
        monkeypatch.setattr(build, "_HEADERS", headers)
        assert build.build(source, PORTABLE) == path
        with (headers / "tile.h").open("a") as header:
            header.write("// changed\n")
        assert build.build(source, PORTABLE) != path

    def test_another_compiler_is_another_library(self, compiler, source):
        path = build.build(source, PORTABLE)
        compiler.becomes(version="fake 1.1")
        assert build.build(source, PORTABLE) != path
        compiler.becomes(version="fake 1.0")
        assert build.build(source, PORTABLE) == path
        assert compiler.num_compiled == 2

    def test_other_flags_are_another_library(self, compiler, source, monkeypatch):
        path = build.build(source, PORTABLE)
        slower = Isa(name="portable", compiler_flags=("-O1",))
        assert build.build(source, slower) != path
        monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-g"))
        assert build.build(source, PORTABLE) != path
        assert compiler.num_compiled == 3

    def test_another_machine_is_another_library(self, compiler, source, monkeypatch):
        path = build.build(source, PORTABLE)
        monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
        assert build.build(source, PORTABLE) != path

    def test_two_processes_at_once_compile_once(self, compiler, cache, source):
        compiler.becomes('sleep 1; gcc "$@"')
        code = (
            "import sys; from pathlib import Path; from plait.kernels.native import NativeLibrary\n"
            "sys.stdin.readline()\n"
            "library = NativeLibrary(Path(sys.argv[1]), counting=('answer',), answer='')\n"
            "print(library.load().answer())"
        )
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(source)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.communicate()[0] for process in processes] == ["42\n", "42\n"]
        assert compiler.num_compiled == 1
        assert len(files(cache)) == 1

    @pytest.mark.parametrize("end", ["kill -9 $$", "exit 1"])
    def test_a_compiler_that_dies_leaves_nothing(self, compiler, cache, source, end):
        compiler.becomes(f'gcc "$@"; truncate -s 100 "$output"; {end}')
        with pytest.raises(NativeBuildError, match=r"cc .*op/native.c -o .* failed:"):
            build.build(source, PORTABLE)
        assert compiler.num_compiled == 1
        assert files(cache) == []
        compiler.becomes()
        assert answer(source) == 42

    def test_a_compiler_that_hangs_is_given_up(self, compiler, cache, source, monkeypatch):
        compiler.becomes("exec sleep 60")
        assert build._compiler() is not None
        monkeypatch.setattr(build, "_TIMEOUT_S", 0.1)
        with pytest.raises(NativeBuildError, match=r"failed: .*timed out"):
            build.build(source, PORTABLE)
        assert files(cache) == []

    def test_words_after_the_compiler_are_passed_on(self, compiler, source, monkeypatch):
        monkeypatch.setenv(build.COMPILER_VARIABLE, "gcc -DUNUSED")
        forget()
        assert answer(source) == 42

    def test_default_folder(self, cache, monkeypatch, tmp_path):
        monkeypatch.delenv(build.CACHE_VARIABLE)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert build.cache_folder() == tmp_path / "plait" / "native"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        forget()
        assert build.cache_folder() == tmp_path / "home" / ".cache" / "plait" / "native"

    def test_a_user_without_a_home(self, compiler, source, monkeypatch):
        def expanduser(_path):
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv(build.CACHE_VARIABLE)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(build.Path, "expanduser", expanduser)
        monkeypatch.setattr(build.Path, "mkdir", lambda *_, **__: None)
        forget()
        assert build.cache_folder() == Path("/nonexistent/plait/native")
        assert answer(source) == 42

    def test_a_library_that_cannot_be_loaded(self, compiler, source):
        build.build(source, isa.chosen_isa()).write_text("not a library")
        with pytest.raises(NativeBuildError, match=r"op-.*\.so cannot be loaded: "):
            answer(source)


class TestFolderThatCannotBeWritten:
    @pytest.fixture(autouse=True)
    def folder(self, compiler, tmp_path, monkeypatch):
        """A file is in the place of the folder."""
        (tmp_path / "file").touch()
        monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
        forget()
        return tmp_path / "file" / "cache"

    def test_every_process_compiles_for_itself(self, compiler, folder, source, caplog):
        path = build.build(source, PORTABLE)
        assert build.build(source, PORTABLE) == path
        assert compiler.num_compiled == 1
        assert answer(source) == 42
        assert caplog.messages == [
            f"{folder} cannot be written: C kernels are compiled anew by every process"
        ]
        assert path.parent.stat().st_mode & 0o777 == 0o700

    def test_a_library_of_another_compiler_serves(
        self, compiler, cache, source, monkeypatch, caplog
    ):
        monkeypatch.setenv(build.CACHE_VARIABLE, str(cache))
        forget()
        path = build.build(source, PORTABLE)
        compiler.becomes(version="fake 1.1")
        monkeypatch.setattr(build.os, "access", lambda _path, _mode: False)
        assert build.build(source, PORTABLE) == path
        assert compiler.num_compiled == 1
        assert caplog.messages == []
        source.write_text(ANSWER % 43)
        assert build.build(source, PORTABLE).parent != cache


class TestWithoutCompiler:
    @pytest.fixture(autouse=True)
    def prebuilt(self, compiler):
        compiler.is_missing()

    def test_the_error_says_what_to_do(self, cache, source):
        with pytest.raises(NativeBuildError) as caught:
            build.build(source, PORTABLE)
        message = str(caught.value)
        assert f"no C compiler runs as 'no-such-compiler' and {cache} holds no op-port" in message
        advice = ("install gcc", "in CC", "PLAIT_NATIVE_CACHE", "python -m plait.kernels.native")
        assert all(words in message for words in advice)

    def test_torch_serves_every_op_and_one_line_says_so(self, caplog):
        assert set(dispatch.chosen_backends(CPU).values()) == {"torch"}
        (message,) = caplog.messages
        assert message.startswith("CPU KERNELS ARE NOT NATIVE, the several times slower ones serve")
        assert "install gcc" in message

    def test_native_kernels_that_were_asked_for_are_refused(self, monkeypatch):
        monkeypatch.setenv(dispatch.BACKEND_VARIABLE, "native")
        forget()
        message = "silu_and_mul: PLAIT_KERNEL_BACKEND=native does not run on cpu, .* one of ref"
        with pytest.raises(BackendError, match=message):
            dispatch.implementation("silu_and_mul", CPU)

    def test_libraries_built_before_serve(self, compiler, caplog):
        compiler.becomes()
        for path in (KERNELS / "native" / "probe.c", KERNELS / "silu_and_mul" / "native.c"):
            build.build(path, isa.chosen_isa())
        compiler.is_missing()
        op = dispatch.implementation("silu_and_mul", CPU)
        assert op is silu_and_mul
        x = torch.ones(1, 2)
        torch.testing.assert_close(op.silu_and_mul(x), x[:, :1].sigmoid())
        assert caplog.messages == []
        assert compiler.num_compiled == 2

    def test_a_compiler_that_does_not_run_is_none(self, compiler, tmp_path, monkeypatch):
        (tmp_path / "cc").write_text("#!/bin/sh\nexit 1\n")
        monkeypatch.setenv(build.COMPILER_VARIABLE, str(tmp_path / "cc"))
        forget()
        assert build._compiler() is None
        monkeypatch.setenv(build.COMPILER_VARIABLE, "gcc 'unclosed")
        forget()
        assert build._compiler() is None


def test_an_op_that_does_not_compile_falls_back_alone(compiler, source, monkeypatch, caplog):
    source.write_text("#error the words of the compiler\n")
    monkeypatch.setattr(silu_and_mul.library, "_source", source)
    module = dispatch.implementation("silu_and_mul", CPU)
    assert module.__name__ == "plait.kernels.silu_and_mul.torch_impl"
    (message,) = caplog.messages
    assert message.startswith("silu_and_mul: the slower torch kernel serves, for C code does not")
    assert "the words of the compiler" in message
    assert build.unavailable() == ""


def test_other_threads_than_those_of_torch_are_noticed_once(compiler, caplog):
    """Where torch brings no OpenMP library that gcc's code can use, no op tries to load its own."""
    compiler.becomes('gcc "$@" -Wl,--wrap=GOMP_parallel')
    assert set(dispatch.chosen_backends(CPU).values()) == {"torch"}
    (message,) = caplog.messages
    assert "CPU KERNELS ARE NOT NATIVE" in message
    assert "undefined symbol: __wrap_GOMP_parallel" in message
    assert compiler.num_compiled == 1


class TestIsa:
    AVX2 = ISAS["avx2"].cpu_flags
    AVX512 = ISAS["avx512"].cpu_flags

    @pytest.fixture(autouse=True)
    def _cache(self, cache):
        pass

    @pytest.fixture
    def cpu(self, monkeypatch):
        def has(flags):
            monkeypatch.setattr(isa, "_cpu_flags", lambda: frozenset(flags))
            isa.chosen_isa.cache_clear()

        monkeypatch.setattr(isa, "_cpu_flags", isa._cpu_flags)
        return has

    @pytest.mark.parametrize("name", ISAS)
    def test_the_best_of_the_cpu_is_chosen(self, cpu, name, monkeypatch):
        cpu(ISAS[name].cpu_flags | {"other"})
        assert isa.chosen_isa().name == name

    def test_a_cpu_that_lacks_one_feature(self, cpu):
        cpu(self.AVX512 - {"avx512dq"})
        assert isa.chosen_isa().name == "avx2"
        cpu(self.AVX2 - {"f16c"})
        assert isa.chosen_isa().name == "portable"
        cpu(())
        assert isa.chosen_isa().name == "portable"

    def test_environment_chooses_another(self, cpu, monkeypatch):
        cpu(self.AVX512)
        monkeypatch.setenv(isa.ISA_VARIABLE, "avx2")
        assert isa.chosen_isa().name == "avx2"

    @pytest.mark.parametrize("name", ["avx512_bf16", "sse9"])
    def test_one_that_is_unknown_or_not_of_the_cpu_is_refused(self, cpu, monkeypatch, name):
        cpu(self.AVX512)
        monkeypatch.setenv(isa.ISA_VARIABLE, name)
        message = f"PLAIT_NATIVE_ISA: expected one of avx512, avx2, portable on .*, got '{name}'"
        with pytest.raises(BackendError, match=message):
            isa.chosen_isa()
        with pytest.raises(BackendError, match=message):
            dispatch.implementation("silu_and_mul", CPU)

    def test_is_logged_once(self, cpu, caplog):
        cpu(self.AVX2)
        with caplog.at_level(logging.INFO):
            isa.chosen_isa()
            isa.chosen_isa()
        assert caplog.messages == ["C kernels use the instruction set avx2"]

    @pytest.mark.parametrize(
        ("machine", "text", "expected"),
        [
            ("x86_64", "processor : 0\nflags\t\t: fpu avx2 fma\nbugs :\n", {"fpu", "avx2", "fma"}),
            ("x86_64", "processor : 0\n", set()),
            ("x86_64", None, set()),
            ("aarch64", "flags : avx2\n", set()),
        ],
    )
    def test_features_of_the_cpu(self, monkeypatch, machine, text, expected):
        def read_text(_path):
            if text is None:
                raise FileNotFoundError
            return text

        monkeypatch.setattr(isa.platform, "machine", lambda: machine)
        monkeypatch.setattr(isa.Path, "read_text", read_text)
        assert isa._cpu_flags() == expected


class TestPrebuild:
    """`python -m plait.kernels.native`, with a compiler that takes no time."""

    def run(self, monkeypatch, *arguments):
        monkeypatch.setattr(sys, "argv", ["native", *arguments])
        runpy.run_module("plait.kernels.native", run_name="__main__")

    @pytest.fixture(autouse=True)
    def _compiler(self, compiler):
        compiler.becomes('echo library > "$output"')

    def test_builds_every_op(self, monkeypatch, cache, capsys):
        self.run(monkeypatch, "avx2")
        built = files(cache)
        assert len(built) == len(SOURCES)
        for source in SOURCES:
            assert sum(name.startswith(f"{source.parent.name}-avx2-") for name in built) == 1
        assert capsys.readouterr().out == f"{len(SOURCES)} libraries in {cache}\n"

    @pytest.mark.parametrize(("machine", "names"), [("x86_64", ISAS), ("aarch64", ["portable"])])
    def test_builds_all_that_the_compiler_knows(self, monkeypatch, cache, machine, names):
        monkeypatch.setattr(isa.platform, "machine", lambda: machine)
        self.run(monkeypatch)
        assert {name.split("-")[1] for name in files(cache)} == set(names)
        assert len(files(cache)) == len(names) * len(SOURCES)

    def test_unknown_names_are_refused(self, monkeypatch, cache):
        with pytest.raises(SystemExit, match=r"expected some of avx512_bf16, .*, got neon, sse9"):
            self.run(monkeypatch, "sse9", "avx2", "neon")
        assert not cache.exists()

    def test_a_folder_that_cannot_be_written_is_refused(self, monkeypatch, tmp_path):
        (tmp_path / "file").touch()
        monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "file"))
        forget()
        with pytest.raises(SystemExit, match="/file cannot be written"):
            self.run(monkeypatch)

    def test_errors_of_the_compiler_end_it(self, monkeypatch, compiler):
        compiler.becomes("echo out of cheese >&2; exit 1")
        with pytest.raises(SystemExit, match="out of cheese"):
            self.run(monkeypatch, "avx2")

    def test_runs_as_a_command(self, cache):
        done = subprocess.run(
            [sys.executable, "-m", "plait.kernels.native", "portable"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"{len(SOURCES)} libraries in {cache}\n"


def test_the_image_is_built_with_libraries():
    """Read-only containers serve native kernels: the folder is filled after its name is set."""
    lines = (Path(__file__).parents[2] / "deploy" / "Dockerfile").read_text()
    final = lines.rpartition("\nFROM ")[2]
    folder = final.index(f"{build.CACHE_VARIABLE}=/")
    assert final.index("install --yes") < folder < final.index("python -m plait.kernels.native")
    assert final.index("python -m plait.kernels.native") < final.index("\nUSER ")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="flags of x86-64 compilers")
@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
def test_compiles_without_warnings(source, name):
    """For all instruction sets, those that cannot run here too. Kept in the cache of the user."""
    flags = ("-Wall", "-Wextra", "-Werror")
    strict = Isa(name=f"{name}_strict", compiler_flags=(*ISAS[name].compiler_flags, *flags))
    build.build(source, strict)


# ---- functions of plait.h -----------------------------------------------------------------------

functions = NativeLibrary(
    Path(__file__).with_name("native_functions.c"),
    counting=("lanes",),
    lanes="",
    exponentials="ppi",
    sigmoids="ppi",
    silus="ppi",
    vector_softplus="ppi",
    scalar_softplus="ppi",
    convert="pipii",
    convert_ones="pipii",
    convert_some="pippii",
    reduce="pppppp",
    transposed="pp",
)
HALVES = [(torch.bfloat16, 1), (torch.float16, 2)]
INF, NAN = float("inf"), float("nan")
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(params=RUNNABLE, ids=lambda variant: variant.name)
def c(request, monkeypatch):
    """The functions of native_functions.c for one instruction set."""
    monkeypatch.setattr(library, "chosen_isa", lambda: request.param)
    return functions.load()


def over(function, x):
    y = torch.full_like(x, NAN)
    function(x.data_ptr(), y.data_ptr(), len(x))
    return y


def floats(low, high):
    """Many floats over a range, a multiple of 16."""
    return torch.linspace(low, high, 1 << 18, dtype=torch.float64).float()


def edges():
    values = [0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-45, 1e-38, -1e-38, 3e38, -3e38]
    values += [88.72, 88.73, -87.3, -87.5, -88.8, -104.0, 20.0, -20.0, 20.001, 100.0]
    return torch.tensor(values + [1.0] * (-len(values) % 16))


def all_halves(dtype):
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def bits(x):
    """Bits of the floats, all NaN alike."""
    return x.masked_fill(x.isnan(), NAN).view(torch.int16 if x.itemsize == 2 else torch.int32)


class TestExponential:
    def test_within_two_units_in_the_last_place(self, c):
        x = floats(-87.33, 88.72)
        expected = x.double().exp()
        error = (over(c.exponentials, x).double() - expected).abs() / expected
        assert error.max() <= 2 * EPS

    def test_edges(self, c):
        x = edges()
        y = over(c.exponentials, x)
        expected = x.exp().masked_fill(x < -87.4, 0)
        torch.testing.assert_close(y, expected, rtol=2 * EPS, atol=1e-44, equal_nan=True)


class TestSigmoid:
    def test_close_to_float64(self, c):
        x = floats(-87.0, 100.0)
        expected = x.double().sigmoid()
        error = (over(c.sigmoids, x).double() - expected).abs() / expected
        assert error.max() <= 4 * EPS

    def test_edges(self, c):
        x = edges()
        y = over(c.sigmoids, x)
        torch.testing.assert_close(y, x.sigmoid(), rtol=4 * EPS, atol=2e-38, equal_nan=True)
        finite = x[x.isfinite()]
        y = over(c.silus, x)[x.isfinite()]
        expected = torch.nn.functional.silu(finite)
        torch.testing.assert_close(y, expected, rtol=4 * EPS, atol=2e-36)


@pytest.mark.parametrize("name", ["scalar_softplus", "vector_softplus"])
class TestSoftplus:
    def test_close_to_float64(self, c, name):
        x = floats(-87.0, 100.0)
        expected = torch.nn.functional.softplus(x.double(), threshold=1e9)
        error = (over(getattr(c, name), x).double() - expected).abs() / expected
        assert error.max() <= 8 * EPS

    def test_edges(self, c, name):
        x = edges()
        y = over(getattr(c, name), x)
        expected = torch.nn.functional.softplus(x)
        torch.testing.assert_close(y, expected, rtol=8 * EPS, atol=2e-38, equal_nan=True)


@pytest.mark.parametrize("name", ["convert", "convert_ones"])
@pytest.mark.parametrize(("dtype", "code"), HALVES)
class TestHalves:
    def test_every_half_becomes_its_float(self, c, name, dtype, code):
        halves = all_halves(dtype)
        y = torch.empty(len(halves))
        getattr(c, name)(halves.data_ptr(), code, y.data_ptr(), 0, len(halves))
        assert torch.equal(bits(y), bits(halves.float()))

    def test_every_half_comes_back(self, c, name, dtype, code):
        halves = all_halves(dtype)
        y = torch.empty_like(halves)
        getattr(c, name)(halves.data_ptr(), code, y.data_ptr(), code, len(halves))
        assert torch.equal(bits(y), bits(halves))

    def test_floats_round_as_those_of_torch(self, c, name, dtype, code):
        """Every half, the middle between every two, the floats beside both, and random bits."""
        halves = all_halves(dtype).float()
        next_halves = halves.roll(-1)
        middles = ((halves.double() + next_halves.double()) / 2).float()
        generator = torch.Generator().manual_seed(0)
        random = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator).to(torch.int32)
        exact = torch.cat([halves, middles])
        up, down = exact.nextafter(torch.tensor(INF)), exact.nextafter(torch.tensor(-INF))
        x = torch.cat([exact, up, down, random.view(torch.float32), edges()])
        y = torch.empty(len(x), dtype=dtype)
        assert len(x) % 16 == 0
        getattr(c, name)(x.data_ptr(), 0, y.data_ptr(), code, len(x))
        assert torch.equal(bits(y), bits(x.to(dtype)))


@pytest.mark.parametrize(("dtype", "code"), [(torch.float32, 0), *HALVES])
def test_a_part_of_a_vector_touches_no_more(c, dtype, code):
    lanes = c.lanes()
    for count in range(lanes + 1):
        x, loaded = torch.full((lanes,), NAN, dtype=dtype), torch.full((lanes,), NAN)
        x[:count] = torch.arange(1, count + 1)
        y = torch.full((lanes,), -1, dtype=dtype)
        c.convert_some(x.data_ptr(), code, loaded.data_ptr(), y.data_ptr(), code, count)
        assert torch.equal(y[:count], x[:count])
        assert (y[count:] == -1).all()
        assert (loaded[count:] == 0).all()


def test_reductions_and_order(c):
    lanes = c.lanes()
    x, y = torch.arange(1.0, lanes + 1), torch.full((lanes,), lanes / 2)
    x[lanes // 2] = -100
    total, most, larger, smaller = (torch.empty(n) for n in (1, 1, lanes, lanes))
    pointers = (tensor.data_ptr() for tensor in (x, y, total, most, larger, smaller))
    c.reduce(*pointers)
    assert total.item() == x.sum().item()
    assert most.item() == x.max().item()
    assert torch.equal(larger, x.maximum(y))
    assert torch.equal(smaller, x.minimum(y))


def test_transpose(c):
    x = torch.arange(float(c.lanes() ** 2))
    y = torch.empty_like(x)
    c.transposed(x.data_ptr(), y.data_ptr())
    assert torch.equal(y.view(c.lanes(), -1), x.view(c.lanes(), -1).t())
