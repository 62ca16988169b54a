"""What `weft serve` is asked to do, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Enough rows for the matmuls, which are a hundredth faster with more; a text is answered when its batch is, and the one
# before it: so not more than needed.
BATCH_TOKENS = 768


@dataclass(frozen=True)
class ModelChoice:
    """A folder, and the name that requests call it by."""

    name: str
    folder: Path

    @classmethod
    def parse(cls, text: str) -> ModelChoice:
        """`name=folder`, or a folder, whose own name it has then; a folder may have = in its path."""
        name, equals, folder = text.partition("=")
        if not equals or "/" in name or Path(text).exists():
            name, folder = Path(text).resolve().name, text
        if not name or not folder:
            raise ValueError(f"got the model {text!r}, expected a folder, or name=folder")
        return cls(name, Path(folder))


def named(choices: Sequence[ModelChoice]) -> tuple[ModelChoice, ...]:
    """The same; raises where there is none, or two have one name."""
    if not choices:
        raise ValueError("got no model, expected a folder, as in `weft serve folder`, or --model name=folder")
    for i, choice in enumerate(choices):
        if other := next((c for c in choices[:i] if c.name == choice.name), None):
            raise ValueError(
                f"got two models with the name {choice.name!r}: {other.folder} and {choice.folder}; name one of them "
                f"otherwise, as in --model other={choice.folder}"
            )
    return tuple(choices)


@dataclass(frozen=True)
class ServeOptions:
    """What the command line asks. Limits are those of each worker, but `port` and `api_key` are common."""

    models: tuple[ModelChoice, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    max_batch_tokens: int = BATCH_TOKENS
    max_concurrent_requests: int = 512
    max_client_batch_size: int = 32
    payload_limit: int = 2_000_000  # bytes of a body
    auto_truncate: bool = False
    api_key: str | None = None
    dtype: str | None = None
    threads: int = 0  # of a worker; 0 for as many as it has cores
    workers: int = 1
    drain_seconds: float = 30.0  # that requests have to end in, once it is told to stop
    log_requests: bool = False

    def __post_init__(self) -> None:
        for name in (
            "max_batch_tokens",
            "max_concurrent_requests",
            "max_client_batch_size",
            "payload_limit",
            "workers",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"got --{name.replace('_', '-')} {value}, expected a number from 1 on")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"got the port {self.port}, expected a number from 0, for any that is free, to 65535")
        if self.threads < 0:
            raise ValueError(f"got {self.threads} threads, expected a number from 0 on")
        if self.api_key is not None and (not self.api_key or not self.api_key.isascii()):
            raise ValueError("got an --api-key that is empty or not ASCII, expected what a header can hold")
        named(self.models)
