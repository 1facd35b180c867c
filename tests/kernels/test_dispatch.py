"""The choice of an implementation."""

import importlib
import logging
from pathlib import Path

import pytest
import torch

import plait.kernels.rms_norm as rms_norm_package
from plait.kernels import dispatch
from plait.kernels.errors import BackendError, DtypeError, KernelError, ShapeError

CPU = torch.device("cpu")
FAST = dispatch.Backend(name="fast", module="fast", min_capability=(9, 0))


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch):
    """Forget earlier choices before and after each test."""

    def forget():
        for function in (dispatch.requested_backend, dispatch.implementation, dispatch._choose):
            function.cache_clear()

    monkeypatch.delenv(dispatch.BACKEND_VARIABLE, raising=False)
    forget()
    yield
    forget()


def choose_by_environment(monkeypatch, name):
    monkeypatch.setenv(dispatch.BACKEND_VARIABLE, name)


def test_every_op_folder_is_a_candidate():
    kernels = Path(rms_norm_package.__file__).parents[1]
    folders = {path.parent.name for path in kernels.glob("*/op.py")}
    assert set(dispatch.CANDIDATES) == folders


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        (op, backend.module)
        for op, by_type in dispatch.CANDIDATES.items()
        for backend in dict.fromkeys(
            (*by_type["cpu"], *by_type["cuda"], dispatch.TORCH, dispatch.REFERENCE)
        )
    ],
)
def test_every_backend_has_the_public_functions_of_its_op(op, backend):
    public = importlib.import_module(f"plait.kernels.{op}").__all__
    module = importlib.import_module(f"plait.kernels.{op}.{backend}")
    assert all(callable(getattr(module, name)) for name in public)


def test_the_first_candidate_of_every_op_runs_on_cpu():
    expected = {op: by_type["cpu"][0].name for op, by_type in dispatch.CANDIDATES.items()}
    assert dispatch.chosen_backends(CPU) == expected
    module = dispatch.implementation("rms_norm", CPU)
    assert module.__name__ == "plait.kernels.rms_norm.native"


def test_environment_chooses_torch(monkeypatch):
    choose_by_environment(monkeypatch, "torch")
    assert set(dispatch.chosen_backends(CPU).values()) == {"torch"}
    module = dispatch.implementation("rms_norm", CPU)
    assert module.__name__ == "plait.kernels.rms_norm.torch_impl"


def test_environment_chooses_the_reference(monkeypatch):
    choose_by_environment(monkeypatch, "reference")
    assert set(dispatch.chosen_backends(CPU).values()) == {"reference"}
    module = dispatch.implementation("rotary", CPU)
    assert module.__name__ == "plait.kernels.rotary.reference"


def test_empty_variable_chooses_nothing(monkeypatch):
    choose_by_environment(monkeypatch, "")
    assert dispatch.requested_backend() is None


def test_environment_is_read_once(monkeypatch):
    choose_by_environment(monkeypatch, "reference")
    assert dispatch.requested_backend() == "reference"
    choose_by_environment(monkeypatch, "torch")
    assert dispatch.requested_backend() == "reference"


def test_unknown_backend_is_refused(monkeypatch):
    choose_by_environment(monkeypatch, "fortran")
    message = "PLAIT_KERNEL_BACKEND: expected one of native, reference, torch, got 'fortran'"
    with pytest.raises(BackendError, match=message):
        dispatch.implementation("rotary", CPU)


def test_other_devices_are_refused():
    with pytest.raises(BackendError, match="rotary: expected a device of type cpu or cuda, got me"):
        dispatch.implementation("rotary", torch.device("meta"))


class TestCapability:
    """A backend that needs a newer device than torch does."""

    cuda = torch.device("cuda", 0)

    @pytest.fixture(params=[(8, 0), (9, 0), (10, 0)], ids=str)
    def capability(self, request, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: request.param)
        return request.param

    @pytest.fixture
    def candidates(self, monkeypatch):
        def use(*backends):
            monkeypatch.setattr(dispatch, "CANDIDATES", {"rotary": {"cuda": backends}})

        return use

    def test_the_best_backend_that_runs_is_chosen(self, capability, candidates, caplog):
        candidates(FAST, dispatch.TORCH)
        is_old = capability < (9, 0)
        with caplog.at_level(logging.WARNING):
            chosen = dispatch.chosen_backends(self.cuda)
            dispatch.chosen_backends(self.cuda)
        assert chosen == {"rotary": "torch" if is_old else "fast"}
        warning = "rotary: the fast kernel cannot run on cuda:0"
        assert caplog.messages == ([warning] if is_old else [])

    def test_no_backend_that_runs(self, capability, candidates):
        candidates(FAST)
        if capability >= (9, 0):
            assert dispatch.chosen_backends(self.cuda) == {"rotary": "fast"}
            return
        with pytest.raises(BackendError, match="rotary: no backend runs on cuda:0"):
            dispatch.chosen_backends(self.cuda)

    def test_a_requested_backend_is_never_replaced(self, capability, candidates, monkeypatch):
        candidates(FAST, dispatch.TORCH)
        choose_by_environment(monkeypatch, "fast")
        if capability >= (9, 0):
            assert dispatch.chosen_backends(self.cuda) == {"rotary": "fast"}
            return
        message = "rotary: PLAIT_KERNEL_BACKEND=fast .* cuda:0, expected one of reference, torch"
        with pytest.raises(BackendError, match=message):
            dispatch.chosen_backends(self.cuda)


def test_errors_are_value_errors_of_the_package():
    for error in (ShapeError, DtypeError, BackendError):
        assert issubclass(error, KernelError)
    assert issubclass(KernelError, ValueError)
