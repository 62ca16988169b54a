"""The model of one life: drawn from the case's numbers, built on all ranks and on the one that compares; its inputs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from campaign import case_random
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import weft
from weft.parallel.files.load import box_of

POSITIONS = 48
# So many shapes of models are drawn for so many cases: DTensor takes 30 ms for each op on a shape that it has not seen.
SHAPES, BLOCK = 8, 2000
ENCODERS = ("Bert", "Roberta", "DistilBert", "ModernBert")
HEADS = {
    "Llama": ("ForCausalLM", "ForCausalLM", "ForCausalLM", "Model", "ForTokenClassification"),
    "GPT2": ("LMHeadModel", "LMHeadModel", "LMHeadModel", "Model", "ForSequenceClassification"),
    **dict.fromkeys(
        ENCODERS, ("ForMaskedLM", "ForMaskedLM", "Model", "ForTokenClassification", "ForSequenceClassification")
    ),
}
CAUSAL = ("ForCausalLM", "LMHeadModel")
_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(*shape: int) -> DeviceMesh:
    """Made once: each has process groups of its own."""
    if shape not in _meshes:
        names = ("data", "tensor")[2 - len(shape) :]
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[shape]


class LivingModel:
    """`shared` on all ranks, and `alone` on the one that compares, which is another one in each case."""

    def __init__(self, seed: int, number: int) -> None:
        self.rng = rng = case_random(seed, number)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        rng.random()  # the world was drawn by this
        self.compares = number % self.size == self.rank
        self.told: list[str] = []
        self.fsdp = self.size in (2, 4) and rng.random() < 0.12
        self.data = 2 if self.fsdp else 1
        self.tensor = self.size // self.data
        shape = random.Random(f"{seed}/{number // BLOCK}/{rng.randrange(SHAPES)}/{self.tensor}")
        self.family = shape.choice(("Llama", "Llama", "Llama", "GPT2", "GPT2", *ENCODERS))
        self.is_encoder = self.family in ENCODERS
        self.head = rng.choice(HEADS[self.family])
        self.causal = self.head in CAUSAL
        self.vocabulary = self.causal or self.head == "ForMaskedLM"
        self.config = self._config(shape)
        self.model_text = f"{self.family}{self.head} {self._shape} fsdp={self.fsdp}"
        self.loose = 1.0  # how much more than rounding the two may differ by now
        self._build()

    # The model ----------------------------------------------------------------------------------------------

    def _config(self, rng: random.Random) -> Any:
        kv = rng.randint(1 if self.family == "Llama" else self.tensor, max(self.tensor, 4))
        groups, d = max(rng.choice((1, 1, 2, 3, 4)), -(-self.tensor // kv)), 2 * rng.randint(1, 8)
        heads = kv * groups if self.family == "Llama" else kv
        self.words = rng.randint(max(7, 4 * self.tensor), 80)
        layers, inner = rng.randint(1, 3), rng.randint(max(5, 4 * self.tensor), 50)
        bias = rng.random() < 0.3
        if self.family == "Llama":
            width = heads * rng.randint(1, 8)
            common = {"vocab_size": self.words, "max_position_embeddings": POSITIONS, "num_hidden_layers": layers}
            options = {
                "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": d, "hidden_size": width,
                "intermediate_size": inner, "attention_bias": bias, "mlp_bias": rng.random() < 0.3,
                "tie_word_embeddings": rng.random() < 0.3, "pad_token_id": rng.choice((None, 0, 3)),
            }  # fmt: skip
            made = transformers.LlamaConfig(**common, **options)
        elif self.family == "GPT2":
            width = heads * d
            none = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
            made = transformers.GPT2Config(
                vocab_size=self.words, n_embd=width, n_head=heads, n_layer=layers, n_positions=POSITIONS, n_inner=inner,
                activation_function=rng.choice(("gelu_new", "relu", "gelu")), bos_token_id=2, eos_token_id=2,
                pad_token_id=0, tie_word_embeddings=rng.random() < 0.7, **none,
            )  # fmt: skip
        else:
            width = heads * d
            made = self._encoder_config(rng, width, heads, layers, inner)
        made.classifier_dropout = 0.0
        self.width = width
        self._shape = f"{layers}x{width} heads {heads}/{kv}x{d} inner {inner} words {self.words}"
        return made

    def _encoder_config(self, rng: random.Random, width: int, heads: int, layers: int, inner: int) -> Any:
        common = {"vocab_size": self.words, "max_position_embeddings": POSITIONS, "pad_token_id": 0}
        if self.family == "DistilBert":
            none = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
            shape = {"dim": width, "n_heads": heads, "n_layers": layers, "hidden_dim": inner}
            return transformers.DistilBertConfig(**common, **shape, **none)
        common |= {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers}
        common |= {"intermediate_size": inner}
        if self.family == "ModernBert":
            options = {name: rng.random() < 0.3 for name in ("attention_bias", "mlp_bias", "norm_bias")}
            return transformers.ModernBertConfig(
                **common, **options, global_attn_every_n_layers=rng.randint(1, 3), local_attention=2 * rng.randint(1, 8)
            )
        none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), 0.0)
        return getattr(transformers, f"{self.family}Config")(**common, **none)

    def layers_in(self, model: Any) -> Any:
        """The list of the layers of a model."""
        base = model if self.head == "Model" else getattr(model, model.base_model_prefix)
        places = {"GPT2": "h", "Bert": "encoder.layer", "Roberta": "encoder.layer", "DistilBert": "transformer.layer"}
        return base.get_submodule(places.get(self.family, "layers"))

    def _build(self) -> None:
        torch.manual_seed(self.rng.randrange(2**31))
        made = getattr(transformers, self.family + self.head)(self.config)
        for p in made.parameters():
            nn.init.normal_(p, 0.0 if p.dim() > 1 else 0.5, 0.2)
        self.alone = copy.deepcopy(made).eval() if self.compares else None
        mesh = mesh_of(2, self.tensor)["tensor"] if self.fsdp else mesh_of(self.size)
        overlap = "off" if self.rng.random() < 0.02 else "on"
        self.shared = weft.parallelize(made.eval(), mesh, overlap=overlap)
        if self.fsdp:
            fully_shard(self.shared, mesh=mesh_of(2, self.tensor)["data"])
        self._make_optimisers()

    def _make_optimisers(self) -> None:
        kind = self.rng.choice(("sgd", "momentum", "adamw", "foreach", "fused"))
        kinds: dict[str, Callable[[Any], Any]] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
            "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, foreach=True),
            "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-2, foreach=False),
            "foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-2, foreach=True),
            "fused": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-2, fused=True),
        }
        self.optimisers = [kinds[kind](m.parameters()) for m in self.models]
        self.model_text += f" {kind}"

    @property
    def models(self) -> list[Any]:
        return [self.shared] if self.alone is None else [self.shared, self.alone]

    def say(self, text: str) -> None:
        self.told[-1:] = [f"{self.told[-1] if self.told else ''} {text}"]

    # Inputs and comparisons ---------------------------------------------------------------------------------

    def batch(self, *, side: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """ids, mask and labels [B, S] from the case's own numbers; the same on all ranks."""
        rng = self.rng
        rows, columns = rng.randint(1, 4), rng.randint(1, 20)
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        side = side or rng.choice(("none", "right", "left", "holes"))
        lengths = torch.tensor([rng.randint(1, columns) for _ in range(rows)])
        mask = torch.arange(columns)[None] < lengths[:, None]
        if side == "none":
            mask = torch.ones(rows, columns, dtype=torch.bool)
        elif side == "left":
            mask = mask.flip(1)
        elif side == "holes":
            mask = torch.rand(rows, columns, generator=generator) < 0.7
            mask[:, 0] = True
        ids = torch.randint(1, self.words, (rows, columns), generator=generator)
        labels = torch.randint(0, self.words, (rows, columns), generator=generator)
        before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
        odd = torch.rand(rows, columns, generator=generator) < 0.2
        labels = labels.masked_fill(~mask | odd | (mask & ~before), -100)
        if mask.any() and not (labels != -100).any():
            at = (mask & before if self.causal else mask).nonzero()
            if at.numel():
                labels[tuple(at[0])] = 1
        self.say(f"{rows}x{columns} {side}")
        return ids, mask.long(), labels

    def close(self, got: Tensor, want: Tensor, what: str, *, rough: float = 1.0) -> None:
        error = float((got - want).abs().max()) if got.numel() else 0.0
        scale = float(want.abs().max()) if want.numel() else 0.0
        limit = (2e-4 + 2e-4 * scale) * self.loose * rough
        if got.shape != want.shape or not error <= limit:
            raise AssertionError(f"{what}: differs by {error:.2e}, may by {limit:.2e}; {got.shape} {want.shape}")

    def check_outputs(self, got: Any, want: Any, mask: Tensor, what: str) -> None:
        name = "logits" if "logits" in got else "last_hidden_state"
        a, b = got[name], want[name]
        a = a.full_tensor() if isinstance(a, DTensor) and a.device_mesh.size() == 1 else a
        keep = mask.bool() if a.dim() == 3 else slice(None)
        self.close(a[keep].detach(), b[keep].detach(), what)

    def _check_gradients(self, rough: float) -> None:
        assert self.alone is not None
        wanted = dict(self.alone.named_parameters())
        for name, p in self.shared.named_parameters():
            if self.fsdp and any(size % 4 for size in p.shape):
                continue  # nobody says which rows of an uneven shard of a shard these are; the next losses tell
            want = wanted[name].grad
            if want is None or p.grad is None:
                if (want is None) != (p.grad is None):
                    raise AssertionError(f"gradient of {name}: {p.grad is None} {want is None}")
                continue
            box = box_of(p)
            assert box is not None
            mine = want[tuple(slice(a, b) for a, b in box)]
            self.close(p.grad.to_local(), mine, f"gradient of {name}", rough=rough)

    def _check_tokens(self, prompt: list[int], tokens: list[int], most: int, ends: set[Any]) -> None:
        assert self.alone is not None
        ended = bool(tokens) and tokens[-1] in ends
        if len(tokens) > most or (len(tokens) < most and not ended) or any(t in ends for t in tokens[:-1]):
            raise AssertionError(f"{prompt} was followed by {tokens}, of at most {most} up to {ends}")
        if not tokens:
            return
        with torch.no_grad():
            logits = self.alone(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        self.close(chosen, logits.max(1).values, f"tokens {tokens} after {prompt}")
