"""What a kernel refuses, and why.

KernelError(ValueError)    an argument has a value that no implementation accepts
├── ShapeError             a tensor has the wrong shape or memory layout
├── DtypeError             a tensor has the wrong dtype
└── BackendError           no implementation can run: unknown backend, wrong or mixed devices
"""


class KernelError(ValueError):
    """An argument has a value that no implementation accepts."""


class ShapeError(KernelError):
    """A tensor has the wrong shape or memory layout."""


class DtypeError(KernelError):
    """A tensor has the wrong dtype."""


class BackendError(KernelError):
    """No implementation can run: unknown backend, wrong or mixed devices."""
