"""Texts to tokens as a request asks: a prompt before them, cut at either end or refused, with offsets, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from weft.jobs.serve.errors import Problem, RequestError

Direction = Literal["right", "left"] | None  # of the end that is cut; None is the tokenizer's own
ResultT = TypeVar("ResultT")
Pair = tuple[str, str]


class RequestTokenizer:
    """`backend` is a tokenizer of the library `tokenizers` that cuts texts at `max_length` tokens, None for nowhere."""

    def __init__(self, backend: Any, max_length: int | None) -> None:
        self._max_length = max_length
        # Copies: what a tokenizer is set to is common to all threads.
        self._whole = _copy(backend)
        self._whole.no_truncation()
        self._cutting: dict[Direction, Any] = {None: backend, "right": _copy(backend), "left": _copy(backend)}
        if max_length is not None:
            for side in ("right", "left"):
                self._cutting[side].enable_truncation(max_length, direction=side)
        self._side = (backend.truncation or {}).get("direction", "right").lower()
        self.vocabulary: int = backend.get_vocab_size(with_added_tokens=True)

    def ids(self, texts: Sequence[str], *, prompt: str, truncate: bool, direction: Direction) -> list[list[int]]:
        """The ids of each text, prompt and special tokens included. Raises where one is too long to be left whole."""
        prompted = [prompt + text for text in texts] if prompt else list(texts)
        return [e.ids for e in self.encodings(prompted, truncate=truncate, direction=direction)]

    def encodings(self, texts: Sequence[str | Pair], *, truncate: bool, direction: Direction) -> list[Any]:
        """What the tokenizer makes of texts or pairs."""
        backend = self._cutting[direction]
        found: list[Any] = _called(lambda: backend.encode_batch_fast(texts))
        if not truncate and self._max_length is not None:
            for encoding in found:
                if len(encoding.ids) >= self._max_length and encoding.overflowing:
                    raise RequestError(Problem.TOO_LARGE, self._too_long(encoding), param="input")
        return found

    def _too_long(self, encoding: Any) -> str:
        special = sum(encoding.special_tokens_mask)
        given = len(encoding.ids) + sum(len(o.ids) - special for o in encoding.overflowing)
        return (
            f"Input validation error: `inputs` must have less than {self._max_length} tokens. Given: {given}; pass "
            f'"truncate": true, or start the server with --auto-truncate'
        )

    def check(self, ids: Sequence[int], *, truncate: bool, direction: Direction = None) -> list[int]:
        """Ids that a request gave, which are taken as they are: the model's own, special tokens included."""
        if bad := next((i for i in ids if not 0 <= i < self.vocabulary), None):
            raise RequestError(Problem.TOKENIZER, f"got the id {bad}, expected one from 0 to {self.vocabulary - 1}")
        most = self._max_length
        if most is None or len(ids) <= most:
            return list(ids)
        if not truncate:
            raise RequestError(
                Problem.TOO_LARGE,
                f"Input validation error: `inputs` must have less than {most} tokens. Given: {len(ids)}",
                param="input",
            )
        return list(ids[:most] if (direction or self._side) == "right" else ids[-most:])

    def tokens(self, text: str, *, special: bool) -> list[dict[str, Any]]:
        """Each token of a text, whole: its id, its part of the text and where that is, as TEI's /tokenize has it."""
        encoding: Any = _called(lambda: self._whole.encode(text, add_special_tokens=special))
        found = []
        for index, token, (start, stop), is_special in zip(
            encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask, strict=True
        ):
            place = (token, None, None) if is_special else (text[start:stop], start, stop)
            found.append(
                {"id": index, "text": place[0], "special": bool(is_special), "start": place[1], "stop": place[2]}
            )
        return found

    def text(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """What the ids say."""
        self.check(ids, truncate=True)
        decoded: str = _called(lambda: self._whole.decode(list(ids), skip_special_tokens=skip_special))
        return decoded


def _copy(backend: Any) -> Any:
    return type(backend).from_str(backend.to_str())


def _called(call: Callable[[], ResultT]) -> ResultT:
    """Its errors are the request's: tokenizers has no class of its own, and what panics in it is no `Exception`."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise RequestError(Problem.TOKENIZER, f"Tokenization error: {type(error).__name__}") from error
