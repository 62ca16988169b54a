"""One life of a parallel model: what the cases of the campaign `parallel` do on each rank."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from parallel_model import POSITIONS, mesh_of
from parallel_text import TextLife
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import weft
from weft.packed import PackedBatch


def run_cases(seed: int, numbers: list[int]) -> None:
    """Runs cases one after the other; the first that fails is named in the error."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    for done, number in enumerate(numbers):
        life: Life | None = None
        try:
            life = Life(seed, number)
            life.run()
        except BaseException as error:
            told = "" if life is None else f"{life.model_text}, {' | '.join(life.told)}"
            raise AssertionError(f"parallel case {number}: {told}") from error
        if done % 16 == 15:
            del life
            gc.collect()


class Life(TextLife):
    """What happens to a model, in any order."""

    def run(self) -> None:
        acts: list[tuple[Callable[[], None], int]] = [
            (self.train, 3), (self.infer, 4), (self.write, 3), (self.refuse, 2), (self.hook, 1), (self.stale, 1),
            (self.operate, 1), (self.evaluate, 1),
        ]  # fmt: skip
        if self.causal:
            acts += [(self.generate, 2), (self.generate_as_hugging_face, 1), (self.go_on, 1), (self.flattened, 1)]
        if not self.fsdp:
            acts += [(self.copy, 1), (self.load, 1), (self.reshard, 1), (self.compile, 0 if self.size > 2 else 1)]
        names = [act for act, weight in acts for _ in range(weight)]
        self.infer()
        for _ in range(self.rng.randint(2, 5)):
            act = self.rng.choice(names)
            self.told.append(act.__name__)
            act()
        self.told.append("infer")
        self.infer()

    # Acts ---------------------------------------------------------------------------------------------------

    def inputs(self) -> tuple[dict[str, Any], Tensor, Tensor]:
        """Padded inputs, that every head takes."""
        side = "right" if self.head == "ForSequenceClassification" or self.is_encoder else None
        ids, mask, labels = self.batch(side=side)
        if self.head == "ForSequenceClassification" and not self.is_encoder:
            ids = ids.masked_fill(mask == 0, 0)
        return {"input_ids": ids, "attention_mask": mask}, mask, labels

    def infer(self) -> None:
        """Without gradients; ids, vectors, packed; some logits only."""
        given, mask, _ = self.inputs()
        way = self.rng.choice(("ids", "ids", "vectors", "packed", "keep", "tuple"))
        mode = self.rng.choice((torch.no_grad, torch.inference_mode))
        mode = torch.no_grad if self.fsdp else mode  # what FSDP gathers in inference mode cannot be trained with
        if not self.vocabulary:
            way = "ids"
        self.say(way)
        packed = None
        if way == "vectors":
            ids = given.pop("input_ids")
            generator = torch.Generator().manual_seed(int(ids.sum()))
            given["inputs_embeds"] = torch.randn(*ids.shape, self.width, generator=generator)
        elif way == "packed" and bool(mask.any()):
            packed = PackedBatch.from_padded(given["input_ids"], mask)
        with mode():
            if packed is not None:
                columns = torch.arange(mask.shape[1]).expand_as(mask)
                got = self.shared(input_ids=packed, position_ids=columns[mask.bool()])
                if self.alone is not None:
                    want = self.alone(**given, position_ids=columns)
                    self.close(got.logits, want.logits[mask.bool()], "packed")
                return
            if way == "keep" and self.causal:
                columns = torch.tensor(sorted(self.rng.sample(range(mask.shape[1]), min(2, mask.shape[1]))))
                given["logits_to_keep"] = columns
                mask = mask[:, columns]
            got = self.shared(**given, return_dict=way != "tuple")
            if self.alone is not None:
                want = self.alone(**given)
                if way == "tuple":
                    self.close(got[0][mask.bool()], want[0][mask.bool()], "tuple")
                else:
                    self.check_outputs(got, want, mask, way)

    def evaluate(self) -> None:
        """A loss without gradients, or hidden states."""
        if not self.vocabulary:
            return
        given, mask, labels = self.inputs()
        if self.rng.random() < 0.5:
            given["output_hidden_states"] = True
        elif bool((labels != -100).any()):
            given["labels"] = labels
        with torch.no_grad():
            got = self.shared(**given)
            if self.alone is None:
                return
            want = self.alone(**given)
        if "labels" in given:
            self.close(got.loss, want.loss, "loss")
        for a, b in zip(got.get("hidden_states") or (), want.get("hidden_states") or (), strict=False):
            self.close(a[mask.bool()], b[mask.bool()], "hidden states")

    def train(self) -> None:
        """Some steps: loss, every gradient, then an optimiser's step; checkpointed or accumulated at times."""
        way = self.rng.choice(("plain", "plain", "accumulate", "checkpoint", "autocast", "clip"))
        self.say(way)
        rounds = 2 if way == "accumulate" else 1
        drawn = [self.inputs() for _ in range(rounds * self.data)]
        if any(not bool((labels != -100).any()) for _, _, labels in drawn):
            return
        way = "plain" if self.fsdp and way == "autocast" else way
        here = mesh_of(2, self.tensor).get_local_rank("data") if self.fsdp else 0
        mine = [drawn[i * self.data + here] for i in range(rounds)]
        for model in self.models:
            model.train()
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        losses = [self._backward(self.shared, given, mask, labels, way) for given, mask, labels in mine]
        if self.alone is not None:
            rough = 200.0 if way == "autocast" else 1.0  # Hugging Face's model computes in bfloat16 then
            all_losses = [
                self._backward(self.alone, given, mask, labels, way, scale=self.data) for given, mask, labels in drawn
            ]
            wanted = [all_losses[i * self.data + here] for i in range(rounds)]
            for got, want in zip(losses, wanted, strict=True):
                self.close(got, want, "loss", rough=rough)
            self._check_gradients(rough)
        if way == "clip" and not self.fsdp:
            for model in self.models:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for model in self.models:
            model.eval()
        if way != "autocast":  # whose gradients are too rough for both models to stay the same
            for optimiser in self.optimisers:
                optimiser.step()
            self.loose = min(self.loose * 2.0, 40.0)

    def _backward(
        self, model: Any, given: dict[str, Any], mask: Tensor, labels: Tensor, way: str, scale: int = 1
    ) -> Tensor:
        def loss() -> Tensor:
            if self.vocabulary:
                return model(**given, labels=labels).loss  # type: ignore[no-any-return]
            out = model(**given)
            states = out[0]
            keep = mask.bool() if states.dim() == 3 else slice(None)
            return states[keep].float().square().mean()  # type: ignore[no-any-return]

        context: Any = contextlib.nullcontext()
        if way == "autocast":
            context = torch.autocast("cpu", dtype=torch.bfloat16)
        with context:
            found = torch.utils.checkpoint.checkpoint(loss, use_reentrant=False) if way == "checkpoint" else loss()
            (found / scale).backward()
        return found.detach()  # type: ignore[no-any-return]

    def write(self) -> None:
        """Weights change, in a way that torch counts or not."""
        way = self.rng.choice(("in place", "data", "shard", "numpy", "copy", "optimiser"))
        if self.fsdp and way in ("shard", "numpy"):
            way = "data"
        self.say(way)
        factor = self.rng.choice((0.5, 0.8, 1.25))
        if self.fsdp:
            self.shared.reshard()  # else the gathered copies are written to, and lost
        for model in self.models:
            for p in model.parameters():
                self._write(p, way, factor)
        if way == "optimiser":
            for optimiser in self.optimisers:
                optimiser.step()
                optimiser.zero_grad()

    def _write(self, p: Any, way: str, factor: float) -> None:
        local = p.to_local() if isinstance(p, DTensor) and way in ("shard", "numpy") else p
        with torch.no_grad():
            if way == "in place":
                p.mul_(factor)
            elif way == "data":
                p.data.mul_(factor)
            elif way == "shard":
                local.data.mul_(factor)
            elif way == "numpy":
                local.detach().numpy()[...] *= factor
            elif way == "copy":
                p.copy_(p * factor)
            else:
                p.grad = p.detach() * (1.0 - factor)

    def refuse(self) -> None:
        """Calls that are refused on all ranks, and leave them in step."""
        ids, mask, labels = self.batch(side="right")
        high = ids.clone()
        high[0, 0] = self.words
        odd = self.rng.choice((torch.bfloat16, torch.float16, torch.float64))
        vectors = torch.zeros(*ids.shape, self.width)
        longer = torch.ones(1, POSITIONS + 1, dtype=torch.int64)
        wrong: list[dict[str, Any]] = [
            {"input_ids": high}, {"inputs_embeds": vectors.to(odd)}, {"inputs_embeds": vectors[..., :-1]},
            {"input_ids": longer}, {"input_ids": ids, "output_attentions": True}, {"input_ids": ids.float()},
            {"input_ids": ids, "attention_mask": mask[:, :-1]}, {"input_ids": ids, "position_ids": ids + POSITIONS},
        ]  # fmt: skip
        at = 1 if self.causal else 0  # what a causal model does not predict does not matter
        if self.vocabulary and int(mask[0].sum()) > at:
            beyond = labels.clone()
            beyond[0, at] = self.words
            wrong += [{"input_ids": ids, "attention_mask": mask, "labels": beyond}]
        given = self.rng.choice(wrong)
        self.say(" ".join(given))
        with torch.set_grad_enabled(self.rng.random() < 0.5):
            self._must_fail(lambda: self.shared(**given))
        self.leave_forward()
        if self.causal:
            self._must_fail(lambda: weft.generate(self.shared, [[self.words]], max_new_tokens=2))

    @staticmethod
    def _must_fail(call: Callable[[], Any]) -> None:
        try:
            call()
        except ValueError:
            return
        raise AssertionError("was not refused")

    def hook(self) -> None:
        """On a module that is never called: refused while it is there."""
        modules = self.layers_in(self.shared).modules()
        module = self.rng.choice([m for m in modules if not isinstance(m, nn.ModuleList)])
        way = self.rng.choice(("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"))
        handle = getattr(module, way)(lambda *args: None)
        with torch.set_grad_enabled(self.rng.random() < 0.5):
            self._must_fail(lambda: self.shared(input_ids=torch.tensor([[1, 2]])))
        handle.remove()
        self.leave_forward()

    def leave_forward(self) -> None:
        """After a call that raised, torch's FSDP takes `reshard()` for one in a forward, and ignores it."""
        if self.fsdp:
            with torch.no_grad():
                self.shared(input_ids=torch.tensor([[1, 2]]))

    def stale(self) -> None:
        """One rank alone forgets what it has made of the weights."""
        model = self.shared if self.vocabulary or self.head == "Model" else getattr(self.shared, self.shared._weft_base)
        if self.rank == self.rng.randrange(self.size):
            model.weft_engine().forget()

    def operate(self) -> None:
        """Layers are cut or moved, and options of modules change."""
        way = self.rng.choice(("cut", "swap", "eps", "scale"))
        self.say(way)
        at = self.rng.randrange(8)
        for model in self.models:
            layers = self.layers_in(model)
            i = at % len(layers)
            if way == "cut" and len(layers) > 1 and not self.fsdp:
                del layers[i]
            elif way == "swap" and len(layers) > 1:
                layers[0], layers[i] = layers[i], layers[0]
            elif way == "eps":
                name = "variance_epsilon" if self.family == "Llama" else "eps"
                setattr(next(m for m in layers[i].modules() if hasattr(m, name)), name, 0.2)
            elif way == "scale" and not self.is_encoder:
                attention = layers[i].attn if self.family == "GPT2" else layers[i].self_attn
                attention.scaling = 0.3
            model.config.num_hidden_layers = len(layers)
            for number, layer in enumerate(layers):
                if not self.is_encoder:
                    (layer.attn if self.family == "GPT2" else layer.self_attn).layer_idx = number
        if way == "cut" and not self.fsdp:
            self._make_optimisers()

    def copy(self) -> None:
        """The life goes on with a deep copy, and the original stays as it was."""
        self.shared = copy.deepcopy(self.shared)
        if self.alone is not None:
            self.alone = copy.deepcopy(self.alone)
        self._make_optimisers()

    def load(self) -> None:
        """`load_state_dict` of other values, copied or assigned."""
        assign = self.rng.random() < 0.5
        self.say(f"assign={assign}")
        for model in self.models:
            state = {name: value * 0.9 if value.is_floating_point() else value for name, value in
                     model.state_dict().items()}  # fmt: skip
            model.load_state_dict(state, assign=assign)
            if assign:
                model.tie_weights()
        if assign:
            self._make_optimisers()

    def reshard(self) -> None:
        """Weights arrive from another model, written into this one's memory."""
        state = {name: p.detach() * 1.1 for name, p in self.shared.named_parameters()}
        weft.reshard_state_dict(state, {name: p.detach() for name, p in self.shared.named_parameters()})
        if self.alone is not None:
            with torch.no_grad():
                for p in self.alone.parameters():
                    p.mul_(1.1)

    def compile(self) -> None:
        """torch.compile around the model changes nothing."""
        if self.rng.random() > 0.3:
            return
        given, mask, _ = self.inputs()
        with torch.no_grad():
            got = torch.compile(self.shared, backend="eager")(**given)
            if self.alone is not None:
                self.check_outputs(got, self.alone(**given), mask, "compiled")
