"""Ops whose gradients have no gradients: better an error that says so than a silent part of the truth."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft._torch import op_name


def refuse_second_order(op: Any) -> None:
    """Makes a backward op say what is missing when someone asks for the gradient of a gradient."""

    def refuse(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            f"gradients of gradients through {op_name(op)} are not defined; leave out create_graph=True, or keep the "
            "overlapped op out of what is differentiated twice"
        )

    op.register_autograd(refuse)
