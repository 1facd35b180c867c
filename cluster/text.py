"""From the tokens of a reply to its text, piece by piece.

One machine serves streamed and whole replies alike, so they cannot differ: the joined pieces are
the decoded tokens, cut before the stop string that is complete first.
"""

from collections.abc import Iterable, Sequence

from plait.cluster.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # what decoding gives for bytes that are no character, or not yet
_CHARACTER_TOKENS = 4  # a character has at most 4 bytes, and a token at least one
_LONGEST_WAIT = 32  # tokens without text after which text that may still change goes out


class TextStream:
    """The text of one reply, as its tokens come in.

    A character that tokens share is held back until it is whole, and so is text that may turn out
    to begin a stop string. For a byte-level vocabulary the result is exact, whatever bytes come.
    With byte-fallback tokens an *invalid* run of bytes may show replacement characters in other
    places than a decode of the whole would.

    Args:
        tokenizer: decodes the tokens.
        stop: texts before which the reply ends.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Iterable[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._matcher = _StopMatcher(tuple(stop))
        self._context: list[int] = []  # tokens whose text is out; they tell how the next ones join
        self._context_text = ""
        self._pending: list[int] = []  # tokens since
        self._num_chars = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the reply."""
        return self._matcher.found

    @property
    def num_chars(self) -> int:
        """Characters decoded so far, those that are held back for a stop string included."""
        return self._num_chars

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these tokens and was not before."""
        text = ""
        for token_id in token_ids:
            if self.stopped is not None:
                break
            if not (self._skip_special and self._tokenizer.id_is_special(token_id)):
                self._pending.append(token_id)
                text += self._deliver(self._decode_pending())
        return text

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        if self.stopped is not None:
            return ""
        whole = self._decode([*self._context, *self._pending])
        text = self._deliver(whole[len(self._context_text) :])
        self._context, self._context_text, self._pending = [], "", []
        return text + self._matcher.flush()

    def _deliver(self, text: str) -> str:
        self._num_chars += len(text)
        return self._matcher.push(text)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)

    def _decode_pending(self) -> str:
        whole = self._decode([*self._context, *self._pending])
        num_kept = 0
        if whole.endswith(_REPLACEMENT) or len(whole) <= len(self._context_text):
            if len(self._pending) <= _CHARACTER_TOKENS:
                return ""
            num_kept = self._unfinished(whole)
            if num_kept == len(self._pending):
                return ""
        return self._advance(num_kept)

    def _unfinished(self, whole: str) -> int:
        """How many of the last tokens may still begin a character.

        Only a place between characters splits the text into two parts that decode alone to what
        they decode to together: inside one, each part shows a replacement of its own.
        """
        tokens = [*self._context, *self._pending]
        for num_kept in range(1, _CHARACTER_TOKENS + 1):
            left, right = tokens[:-num_kept], tokens[-num_kept:]
            if self._decode(left) + self._decode(right) == whole:
                return num_kept
        return 0 if len(self._pending) > _LONGEST_WAIT else len(self._pending)

    def _advance(self, num_kept: int) -> str:
        """Let go of all pending tokens but the last ones; they become the context."""
        split = len(self._pending) - num_kept
        done = self._pending[:split]
        text = self._decode([*self._context, *done])[len(self._context_text) :]
        self._context, self._pending = done, self._pending[split:]
        self._context_text = self._decode(done)
        return text


class _StopMatcher:
    """Finds the stop string that is complete first, in time linear in the text.

    For each stop string it knows how much of it the text ends with (Knuth, Morris, Pratt); the
    longest such beginning is what has to be held back.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.found: str | None = None
        self._stops = tuple((stop, _borders(stop)) for stop in stops)
        self._matched = [0] * len(stops)
        self._held = ""

    def push(self, text: str) -> str:
        if not self._stops:
            return text
        seen = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._step(char)
            if self.found is not None:
                return seen[: end - len(self.found)]
        safe = len(seen) - max(self._matched)
        self._held = seen[safe:]
        return seen[:safe]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return "" if self.found is not None else held

    def _step(self, char: str) -> None:
        for i, (stop, borders) in enumerate(self._stops):
            length = self._matched[i]
            while length and stop[length] != char:
                length = borders[length - 1]
            length += stop[length] == char
            self._matched[i] = length
            if length == len(stop) and len(stop) > len(self.found or ""):
                self.found = stop


def _borders(text: str) -> list[int]:
    """For each beginning of `text`, the longest shorter beginning that it also ends with."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        length += text[i] == text[length]
        borders[i] = length
    return borders
