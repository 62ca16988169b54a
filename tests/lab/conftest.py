"""One lab for each module that asks for it; those that need namespaces are skipped where there are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weft.lab import Cluster
from weft.lab.linux import namespaces_available


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips with the reason and the remedy when this machine cannot make a lab."""
    available, reason = namespaces_available()
    if not available:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def cluster(namespaces: None) -> Iterator[Cluster]:
    """2 hosts of 2 devices at 0.1 Gbit/s: slow enough that a limit which does not hold is seen at once."""
    with Cluster(hosts=2, devices=2, gbps=0.1) as lab:
        yield lab
