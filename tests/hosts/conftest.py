"""A lab of two hosts, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weft.lab import Cluster
from weft.lab.linux import namespaces_available


@pytest.fixture(scope="session")
def lab() -> Iterator[Cluster]:
    available, reason = namespaces_available()
    if not available:
        pytest.skip(reason)
    with Cluster(hosts=2, devices=1, gbps=1.0) as cluster:
        yield cluster
