"""A backward pass in two parts: the gradients of the inputs first, those of the weights later. Nothing twice.

Nodes of the autograd graph from which an input can be reached are *on the path*. The first part runs these only,
so that a linear layer multiplies once, for its input. Where the path touches a branch that leads to weights alone,
the gradient that flows into the node is kept. The second part starts from what was kept and runs the branches.

    first part    grad_outputs -> nodes on the path -> gradients of the inputs      keeps grads into frontier nodes
    second part   kept grads -> frontier nodes, for the branches only -> branches -> weight.grad

A weight that two nodes on the path use directly (without a transpose or a cast of its own between) cannot be told
apart by autograd's engine: its gradient is made in the first part, with the right value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = tuple[Tensor | None, ...]


class SplitBackward:
    """The backward pass of one graph, in two calls; the graph is freed by the second.

    >>> layer, x = torch.nn.Linear(2, 3), torch.ones(1, 2, requires_grad=True)
    >>> split = SplitBackward([get_gradient_edge(layer(x))], [torch.ones(1, 3)], [x])
    >>> split.input_gradients()[0].shape, layer.weight.grad
    (torch.Size([1, 2]), None)
    >>> split.weight_gradients()
    >>> layer.weight.grad.shape, x.grad
    (torch.Size([3, 2]), None)
    """

    def __init__(
        self, outputs: Sequence[GradientEdge], grad_outputs: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> None:
        self._outputs, self._grads = list(outputs), list(grad_outputs)
        self._inputs = [get_gradient_edge(x) for x in inputs]
        self._kept: dict[Node, Grads] = {}
        self._graph = _Graph(self._outputs, self._inputs)

    def input_gradients(self) -> list[Tensor | None]:
        """The gradient of each input; None for one that the outputs do not depend on. Weights get none yet."""
        graph = self._graph
        if not any(graph.on_path[root.node] for root in self._outputs):
            return [None] * len(self._inputs)
        hooks = [node.register_prehook(self._keep(node)) for node in graph.frontier]
        early = [GradientEdge(leaf, 0) for leaf in graph.shared_leaves]
        try:
            found: Sequence[Tensor | None] = torch.autograd.grad(
                self._outputs,
                [*self._inputs, *early],
                self._grads,
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
        _accumulate(zip(early, found[len(self._inputs) :], strict=True))
        return list(found[: len(self._inputs)])

    def weight_gradients(self) -> None:
        """Adds to the `grad` of all weights, and frees the graph."""
        graph = self._graph
        roots = [pair for pair in zip(self._outputs, self._grads, strict=True) if not graph.on_path[pair[0].node]]
        for node, grads in self._kept.items():
            there = [(GradientEdge(node, i), grad) for i, grad in enumerate(grads) if grad is not None]
            branches = graph.frontier[node]
            found = torch.autograd.grad(
                [edge for edge, _ in there],
                branches,
                [grad for _, grad in there],
                retain_graph=True,
                allow_unused=True,
            )
            roots += zip(branches, found, strict=True)
        _accumulate(roots, leave_out=graph.shared_leaves)
        self._kept, self._outputs, self._grads, self._graph = {}, [], [], _Graph([], [])

    def _keep(self, node: Node) -> Callable[[Grads], None]:
        def hook(grads: Grads) -> None:
            self._kept[node] = grads

        return hook


class _Graph:
    """What the two parts need to know of a graph.

    on_path:       for each node whether an input can be reached from it
    frontier:      nodes on the path -> their edges to branches that lead to weights alone
    shared_leaves: the AccumulateGrad nodes of weights whose gradient cannot be told apart
    """

    def __init__(self, outputs: Sequence[GradientEdge], inputs: Sequence[GradientEdge]) -> None:
        order = _postorder([edge.node for edge in outputs])
        wanted = {edge.node for edge in inputs}
        self.on_path: dict[Node, bool] = {}
        parents: dict[Node, set[Node]] = {}
        for node in order:
            children = _children(node)
            self.on_path[node] = node in wanted or any(self.on_path[edge.node] for edge in children)
            for edge in children:
                parents.setdefault(edge.node, set()).add(node)
        self.frontier: dict[Node, list[GradientEdge]] = {}
        shared: list[Node] = []
        for node in order:
            if not self.on_path[node]:
                continue
            branches = {(e.node, e.output_nr): e for e in _children(node) if not self.on_path[e.node]}
            shared += [edge.node for edge in branches.values() if len(parents[edge.node]) > 1]
            alone = [edge for edge in branches.values() if len(parents[edge.node]) == 1]
            if alone:
                self.frontier[node] = alone
        self.shared_leaves = [node for node in _postorder(shared) if not node.next_functions]


def _children(node: Node) -> list[GradientEdge]:
    return [GradientEdge(child, index) for child, index in node.next_functions if child is not None]


def _postorder(roots: Sequence[Node]) -> list[Node]:
    """All nodes below the roots, each after those below it. Not recursive: graphs are deeper than Python's stack."""
    found: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            found.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(edge.node, False) for edge in _children(node)]
    return found


def _accumulate(roots: Any, leave_out: Sequence[Node] = ()) -> None:
    """Runs the graph from edges with their gradients down to the weights; hooks of the weights run as usual."""
    given = [(edge, grad) for edge, grad in roots if grad is not None]
    edges, grads = [edge for edge, _ in given], [grad for _, grad in given]
    if leave_out:
        leaves = [n for n in _postorder([e.node for e in edges]) if hasattr(n, "variable") and n not in leave_out]
        if leaves:
            torch.autograd.backward(edges, grads, inputs=[leaf.variable for leaf in leaves])
    elif edges:
        torch.autograd.backward(edges, grads)
