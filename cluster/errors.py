"""Errors of the service.

PlaitError (plait.worker.errors)
├── RequestError         what a client sent cannot be served: becomes a 4xx
│   ├── ParameterError       one field is wrong; names it
│   ├── ContextLengthError   prompt and output do not fit the model's context or the cache
│   └── UnknownModelError    no such model is served
├── OverloadedError      queues are full or no replica is there in time: 503 with Retry-After
└── ReplicaError         the replica that ran a request failed: 500, or an error event in a stream
"""

from plait.worker.errors import PlaitError


class RequestError(PlaitError):
    """A client's mistake. `param` is the field of the request, `code` OpenAI's error code."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ParameterError(RequestError):
    """A field with a value that cannot be used."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}", param=param, code="invalid_value")


class ContextLengthError(RequestError):
    """A request that is longer than what can be served."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class UnknownModelError(RequestError):
    """A model name that is not served here."""

    def __init__(self, model: str, served: str) -> None:
        super().__init__(
            f"model {model!r} does not exist; this server serves {served!r}",
            param="model",
            code="model_not_found",
        )


class OverloadedError(PlaitError):
    """Nothing is free in time. `retry_after_s` says when to try again."""

    def __init__(self, message: str, *, retry_after_s: int = 5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ReplicaError(PlaitError):
    """The model copy that ran a request failed; the request may be sent again."""
