"""What people do to the modules of a model between two calls. Each treatment says how a packed model must take it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import packed_parts as parts
import torch
from torch import nn
from torch.nn.utils import parametrize

from weft.packed import pack

Undo = Callable[[], None]
NOTICES_DATA = importlib.util.find_spec("weft.kernels.freshness") is not None


@dataclass
class Patient:
    """A model and its packed twin. `expects` is how calls must be refused, `rough` that they compute in bfloat16."""

    model: Any
    packed: Any
    expects: str | None = None
    may_work: bool = False
    rough: bool = False

    def refuses(self, message: str, *, or_works: bool = False) -> None:
        self.expects, self.may_work = message, or_works

    def recover(self) -> None:
        self.expects, self.may_work, self.rough = None, False, False

    def repack(self) -> None:
        self.packed = pack(self.model)


def nothing(r: Random, patient: Patient) -> None:
    """Two calls one after the other."""


def writes(r: Random, patient: Patient) -> None:
    """Weights written in place, also past torch's version counters where these are watched."""
    for p in r.sample(list(patient.model.parameters()), 3):
        if NOTICES_DATA and r.random() < 0.5:
            p.data.mul_(1.25)
        else:
            with torch.no_grad():
                p.mul_(1.25)


def steps(r: Random, patient: Patient) -> None:
    parameters = [p for p in patient.model.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = torch.randn_like(p)
    parts.optimiser_of(r, parameters).step()
    patient.model.zero_grad()


def loads(r: Random, patient: Patient) -> None:
    state = {k: v * 1.1 if v.is_floating_point() else v for k, v in patient.model.state_dict().items()}
    who = r.choice([patient.model, patient.packed])
    who.load_state_dict(state, assign=r.random() < 0.5)
    patient.repack() if who is patient.model and r.random() < 0.3 else None


def adapter(r: Random, patient: Patient) -> Undo:
    parent, name, inner = r.choice(parts.linears(patient.model))
    weight: Any = inner.weight
    outputs, inputs = weight.shape if type(inner) is nn.Linear else weight.shape[::-1]
    setattr(parent, name, parts.Lora(inner, outputs, inputs))
    patient.refuses(r"Lora, which a packed model does not know")
    return lambda: setattr(parent, name, inner)


def hook(r: Random, patient: Patient) -> Undo:
    module = r.choice(list(parts.layers_of(patient.model).modules())[1:])
    register = r.choice(
        [module.register_forward_hook, module.register_forward_pre_hook, module.register_full_backward_hook]
    )
    handle = register(lambda *_: None)
    patient.refuses("has a hook")
    return handle.remove


def global_hook(r: Random, patient: Patient) -> Undo:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    patient.refuses("a hook for all modules is registered")
    return handle.remove


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def parametrized(r: Random, patient: Patient) -> Undo:
    _, _, module = r.choice(parts.linears(patient.model))
    parametrize.register_parametrization(module, "weight", Doubled())
    patient.refuses("Parametrized")
    return lambda: parametrize.remove_parametrizations(module, "weight", leave_parametrized=False) and None


def patched(r: Random, patient: Patient) -> Undo:
    module: Any = r.choice(list(parts.layers_of(patient.model).modules())[1:])
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs)
    patient.refuses("has another forward than its class came with")
    return lambda: delattr(module, "forward")


def cut(r: Random, patient: Patient) -> None:
    """One layer less, wherever the list of layers hangs."""
    layers = parts.layers_of(patient.model)
    if len(layers) < 2:
        return
    base = parts.base_of(patient.model)
    parent, name = next((m, n) for m in base.modules() for n, child in m.named_children() if child is layers)
    setattr(parent, name, layers[:-1])
    if parent is base:
        patient.refuses("have been replaced since; pack it again")
        try:
            patient.packed(torch.ones(1, 2, dtype=torch.int64))
            raise AssertionError("a layer was cut off, and nobody noticed")
        except ValueError:
            patient.recover()
            patient.repack()


def swap(r: Random, patient: Patient) -> None:
    """Another layer of the same kind in the place of one."""
    layers = parts.layers_of(patient.model)
    place = r.randrange(len(layers))
    memo: Any = parts.build(r, type(parts.base_of(patient.model)).__name__.removesuffix("Model"), "Model")
    donor = parts.layers_of(memo)
    fresh = donor[0] if _fits(donor[0], layers[place]) and r.random() < 0.5 else _copy(layers[place])
    if "attention_type" in layers[place].__dict__ and fresh.attention_type != layers[place].attention_type:
        fresh = _copy(layers[place])
    # Hugging Face records hidden states by hooks that it sets once; a layer that came later would not be recorded.
    own = {
        k: h for k, h in layers[place]._forward_hooks.items() if h.__module__ == "transformers.utils.output_capturing"
    }
    fresh._forward_hooks.update(own)
    layers[place] = fresh.train(layers[place].training)


def _fits(a: nn.Module, b: nn.Module) -> bool:
    mine = [(n, tuple(p.shape)) for n, p in a.named_parameters()]
    options = ("num_heads", "n_heads", "num_attention_heads", "head_dim", "num_key_value_groups", "layer_idx")
    alike = [[m.__dict__.get(o) for o in options] for m in a.modules()] == [
        [m.__dict__.get(o) for o in options] for m in b.modules()
    ]
    # What a layer does with a mask that was made for another attention, no packed model does: it is refused.
    masks = [{m.config._attn_implementation for m in x.modules() if hasattr(m, "config")} for x in (a, b)]
    return mine == [(n, tuple(p.shape)) for n, p in b.named_parameters()] and alike and masks[0] == masks[1]


def _copy(layer: nn.Module) -> Any:
    import copy

    fresh = copy.deepcopy(layer)
    for p in fresh.parameters():
        p.data.add_(torch.randn_like(p), alpha=0.1)
    return fresh


def options(r: Random, patient: Patient) -> None:
    """Numbers that modules hold, and that their code reads when it runs."""
    for module in patient.model.modules():
        if type(module) is nn.LayerNorm:
            module.eps = r.choice([1e-5, 1e-3])
        if "scaling" in module.__dict__ and r.random() < 0.5:
            module.scaling *= 0.7  # type: ignore[operator]
        if "act_fn" in module.__dict__ or "intermediate_act_fn" in module.__dict__.get("_modules", {}):
            name = "act_fn" if "act_fn" in module.__dict__ else "intermediate_act_fn"
            setattr(module, name, r.choice([nn.ReLU(), nn.SiLU(), nn.GELU(), nn.GELU("tanh")]))
    config = patient.model.config
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "resid_pdrop", "attn_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.9)  # no module reads it any more
    config.hidden_act = "gelu_10"


def modes(r: Random, patient: Patient) -> Undo:
    """Training mode, in which some modules that would drop are in eval mode, or recompute in the backward pass."""
    model, packed = patient.model, patient.packed
    model.train()
    packed.train()
    dropouts = [m for m in parts.base_of(model).modules() if type(m) is nn.Dropout]
    for module in r.sample(dropouts, min(2, len(dropouts))):
        module.p = 0.5
        module.eval()
    for module in parts.base_of(model).modules():  # attention takes the probability, but its own mode
        drops = any(d in dropouts and d.p for d in module.children())
        if type(module).__name__.endswith("Attention") and (drops or r.random() < 0.5):
            module.eval()
    if r.random() < 0.4:
        packed.gradient_checkpointing_enable()

    def undo() -> None:
        packed.gradient_checkpointing_disable()
        model.eval()
        packed.eval()
        parts.no_dropout(model)

    return undo


def frozen(r: Random, patient: Patient) -> Undo:
    chosen = [p for p in patient.model.parameters() if r.random() < 0.5]
    for p in chosen:
        p.requires_grad_(False)

    def undo() -> None:
        for p in chosen:
            p.requires_grad_(True)

    return undo


def half(r: Random, patient: Patient) -> Undo:
    patient.packed.half()
    patient.refuses("weft computes in float32 and bfloat16 on cpu, got torch.float16|computes in torch.float16, got")
    return lambda: patient.packed.float() and None


def bfloat16(r: Random, patient: Patient) -> Undo:
    patient.packed.bfloat16()
    patient.rough = True
    return lambda: patient.packed.float() and None


def resized(r: Random, patient: Patient) -> None:
    patient.model.resize_token_embeddings(parts.VOCABULARY + r.choice([1, 3]), mean_resizing=False)
    patient.repack()


def copied(r: Random, patient: Patient) -> None:
    """A copy takes the place of the packed model; weights of a deep copy are its own."""
    if any(m._forward_hooks for m in patient.model.modules()):
        return  # once Hugging Face has recorded hidden states, its models cannot be pickled either
    before = patient.packed
    patient.packed = parts.copied(r, before)
    if next(patient.packed.parameters()) is not next(before.parameters()):
        patient.packed.load_state_dict(before.state_dict())
        patient.model = _unpacked(patient.packed, patient.model)
        patient.repack()


def _unpacked(packed: Any, model: Any) -> Any:
    import copy

    fresh = copy.deepcopy(model)
    fresh.load_state_dict(packed.state_dict())
    return fresh


def wrong_call(r: Random, patient: Patient) -> None:
    """A call that raises, before a good one."""
    for bad in ({"input_ids": torch.full((1, 3), 10**6)}, {"input_ids": torch.ones(1, 3)}):
        try:
            patient.packed(**bad)
        except ValueError:
            continue
        raise AssertionError(f"{bad} was computed")


TREATMENTS: list[Callable[[Random, Patient], Any]] = [
    nothing, nothing, writes, writes, steps, loads, adapter, hook, global_hook, parametrized, patched, cut, swap,
    options, modes, modes, frozen, half, bfloat16, resized, copied, wrong_call,
]  # fmt: skip
