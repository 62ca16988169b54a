"""A short run of the campaign."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from packed import part


def test_packed_models_beside_hugging_face() -> None:
    threads = torch.get_num_threads()
    try:
        cases, failures, counts = part((1, 0, 60))
    finally:
        torch.set_num_threads(threads)
    assert not failures, "\n".join(failures)
    assert cases == 60
    assert counts["compared"] > counts["refused"] > 0
