"""Choices in OpenAI's shapes, for completions and for chats."""

from collections.abc import Iterator, Sequence
from typing import Any

from plait.cluster.api.generation import DrawnToken, Piece
from plait.cluster.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # OpenAI's word for "impossible"; JSON has no infinity


class CompletionReply:
    """Choices of `/v1/completions`. `echoes` holds a text per choice that goes before it."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer, *, has_logprobs: bool, echoes: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._echoes = tuple(echoes)

    def choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": (self._echoes[piece.index] if piece.is_first else "") + piece.text,
            "logprobs": self._logprobs(piece.drawn) if self._has_logprobs else None,
            "finish_reason": piece.finish_reason,
        }

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        choice = self.choice(piece)
        return [choice] if choice["text"] or piece.drawn or piece.finish_reason else []

    def _logprobs(self, drawn: Sequence[DrawnToken]) -> dict[str, Any]:
        text = self._tokenizer.token_text
        return {
            "tokens": [text(token.token_id) for token in drawn],
            "token_logprobs": [_number(token.logprob.logprob) for token in drawn],
            "top_logprobs": [self._top(token) for token in drawn],
            "text_offset": [token.offset for token in drawn],
        }

    def _top(self, token: DrawnToken) -> dict[str, float]:
        """The likeliest tokens and the drawn one, which need not be among them."""
        top: dict[str, float] = {}
        for token_id, value in (*token.logprob.top, (token.token_id, token.logprob.logprob)):
            top.setdefault(self._tokenizer.token_text(token_id), _number(value))
        return top


class ChatReply:
    """Choices of `/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, has_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs

    def choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": piece.index, "message": message, **self._rest(piece)}

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        return list(self._deltas(piece))

    def _deltas(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if piece.is_first:
            first = {"role": "assistant", "content": ""}
            yield {"index": piece.index, "delta": first, "logprobs": None, "finish_reason": None}
        if piece.text or piece.drawn or piece.finish_reason:
            delta = {"content": piece.text} if piece.text else {}
            yield {"index": piece.index, "delta": delta, **self._rest(piece)}

    def _rest(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self._has_logprobs:
            logprobs = {"content": [self._entry(token) for token in piece.drawn], "refusal": None}
        return {"logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _entry(self, token: DrawnToken) -> dict[str, Any]:
        top = [self._token(token_id, value) for token_id, value in token.logprob.top]
        return {**self._token(token.token_id, token.logprob.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": _number(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


def _number(logprob: float) -> float:
    # Written so that NaN fails the comparison too.
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB
