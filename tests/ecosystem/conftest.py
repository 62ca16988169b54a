"""Who computed: tests that compare losses would not notice that weft had no part in them."""

from __future__ import annotations

from typing import Any

import pytest

from weft.packed import registry


@pytest.fixture
def by_registry(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries each call of the registry's attention has computed."""
    found: list[int] = []
    attention = registry.attention

    def counting(q: Any, *args: Any) -> Any:
        found.append(q.shape[0])
        return attention(q, *args)

    monkeypatch.setattr(registry, "attention", counting)
    return found
