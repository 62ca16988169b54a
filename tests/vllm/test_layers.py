"""Which layers are replaced, without an engine: the decision, its reason, and the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm")

from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from weft.vllm import layers


class _Recorder:
    """Stands where vLLM's own choice is, and says for which layers it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __call__(self, layer: Any, remove_weight: bool) -> None:
        self.asked.append(layer)


def _layer(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    layer = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_is_packed_and_freed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "multiplies_bfloat16", lambda: False)
    w, x, bias, original = torch.randn(33, 20).to(dtype), torch.randn(5, 20).to(dtype), torch.randn(33), _Recorder()
    layer = _layer(w, bias.to(dtype))
    layers.native_dispatch(original)(layer, True)
    assert original.asked == []
    assert layer.weft_left_alone is None
    assert layer.weight.numel() == 0
    y = layer.cpu_linear(x, layer.weight, layer.bias)
    expected = nn.functional.linear(x.double(), w.double(), bias.to(dtype).double())
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.1)


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "3 dims": (lambda: _layer(torch.ones(4, 1, 4)), r"shape \[4, 1, 4\], expected \[N, K\]"),
    "meta": (lambda: _layer(torch.ones(4, 4, device="meta")), "on meta"),
    "float16": (lambda: _layer(torch.ones(4, 4, dtype=torch.float16)), "is float16, expected float32 or bfloat16"),
    "bias": (lambda: _layer(torch.ones(4, 4), torch.ones(4, dtype=torch.bfloat16)), "bias is bfloat16"),
}


@pytest.mark.parametrize("kind", LEFT)
def test_others_are_left_alone_with_a_reason(kind: str) -> None:
    make, reason = LEFT[kind]
    layer, original = make(), _Recorder()
    layers.native_dispatch(original)(layer, True)
    assert original.asked == [layer]
    assert not hasattr(layer, "cpu_linear")
    assert layer.weight.numel() > 0
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(layer.weft_left_alone)


def test_bfloat16_is_left_alone_where_the_cpu_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "multiplies_bfloat16", lambda: True)
    assert "oneDNN" in str(layers.why_not(_layer(torch.ones(4, 4, dtype=torch.bfloat16))))
    assert layers.why_not(_layer(torch.ones(4, 4))) is None


def _embedding() -> VocabParallelEmbedding:
    layer = VocabParallelEmbedding.__new__(VocabParallelEmbedding)  # a real one needs vLLM's groups
    nn.Module.__init__(layer)
    layer.weight = nn.Parameter(torch.randn(8, 4), requires_grad=False)
    layers.native_dispatch(_Recorder())(layer, False)
    return layer


def test_an_embedding_is_packed_when_it_is_multiplied_with() -> None:
    layer, x = _embedding(), torch.randn(3, 4)
    assert layer.cpu_linear._packed is None
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), x @ layer.weight.t())
    assert layer.cpu_linear._packed is not None


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda layer: layer.weight.mul_(2),
    "past the version": lambda layer: layer.weight.data.add_(torch.randn(8, 4)),
    "another one": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(8, 4), requires_grad=False)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_weight_that_is_kept_is_packed_again_when_it_changed(write: str) -> None:
    layer, x = _embedding(), torch.randn(3, 4)
    before = layer.cpu_linear(x, layer.weight, None)
    first = layer.cpu_linear._packed
    assert torch.equal(layer.cpu_linear(x, layer.weight, None), before)
    assert layer.cpu_linear._packed is first
    with torch.no_grad():
        WRITES[write](layer)
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), x @ layer.weight.t())


def test_a_weight_that_was_freed_and_is_given_again_is_used() -> None:
    layer, x, other = _layer(torch.randn(8, 4)), torch.randn(3, 4), torch.randn(8, 4)
    layers.native_dispatch(_Recorder())(layer, True)
    layer.weight = nn.Parameter(other, requires_grad=False)
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), x @ other.t())


def test_a_weight_that_is_kept_is_not_frozen_into_a_compiled_graph() -> None:
    layer, x = _embedding(), torch.randn(3, 4)
    compiled = torch.compile(lambda x: layer.cpu_linear(x, layer.weight, None), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), x @ layer.weight.t())
    layer.weight.data.mul_(2)
    torch.testing.assert_close(compiled(x), x @ layer.weight.t())
