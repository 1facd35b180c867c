"""What the HTTP layer needs from whoever runs the model."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from plait.cluster.request import RequestSpec, TokenChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that is served.

    Args:
        name: as clients call it.
        max_model_len: tokens of prompt and output that the model can relate.
        max_request_tokens: tokens of prompt and output that the cache can hold for one request.
        created: seconds since the epoch.
        vocab_size: ids that the model has an embedding for; None is those of the tokenizer.
    """

    name: str
    max_model_len: int
    max_request_tokens: int
    created: int
    vocab_size: int | None = None


class Engine(Protocol):
    """A model, near or far.

    Failures are raised: `OverloadedError` when the request cannot be taken in now, `RequestError`
    when it cannot be served at all, `ReplicaError` when it was lost on the way.
    """

    def generate(self, spec: RequestSpec) -> AsyncIterator[TokenChunk]:
        """The tokens of a request, each once and in order; the last chunk has a finish reason.

        Cancelling the task that waits for a chunk, or `aclose()`, aborts the request; after the
        last chunk it does nothing. Nothing runs before the first chunk is asked for.
        """
        ...

    async def is_ready(self) -> bool:
        """Whether a request sent now would be served."""
        ...

    async def is_healthy(self) -> bool:
        """Whether steps make progress."""
        ...

    async def plan(self) -> dict[str, Any]:
        """The cache plan, as `/plan` shows it."""
        ...

    async def metrics(self) -> bytes:
        """Everything measured, in Prometheus' text format."""
        ...
