"""One random model of a family, and what must hold for it: Hugging Face's own numbers, and the same bits in all forms.

Case `number` of a seed is always the same model with the same texts. Each check raises AssertionError.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from exact_gradients import InFloat64, check_by_exact, distance
from family_table import PAD, POSITIONS, ROWS
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import weft
from weft.errors import Unsupported
from weft.parallel.stages import model_stage

transformers.logging.set_verbosity_error()

CLOSE = 1e-4
LOSSES_CLOSE = 5e-5
NEW = 5  # tokens that are generated
IGNORED = -100


class Case:
    """A model of the row `name`, four texts of it, and random numbers for what else is needed."""

    def __init__(self, name: str, seed: int, number: int, *, ranks: int = 1) -> None:
        self.row = ROWS[name]
        self.random = Random(f"{name}/{seed}/{number}")
        self.config = self.row.random_config(self.random, ranks)
        self.seed = self.random.randrange(2**31)
        self.generator = torch.Generator().manual_seed(self.seed)
        lengths = [self.random.randint(1, 14) for _ in range(3)] + [self.random.randint(15, 24)]
        self.random.shuffle(lengths)
        self.texts = [self.text(length) for length in lengths]

    def text(self, length: int) -> Tensor:
        """int64 [length], without padding tokens."""
        return torch.randint(PAD + 3, self.config.vocab_size, (length,), generator=self.generator)

    def model(self, name: str | None = None, *, pooler: bool = False) -> Any:
        """A model in eval mode, with eager attention and weights that are large enough for every part to matter.

        A base model has its pooler only where asked for: that reads the first column, so it refuses some forms.
        """
        config = copy.deepcopy(self.config)
        config._attn_implementation = "eager"
        kind = getattr(transformers, name or self.row.base)
        has_pooler = "add_pooling_layer" in signature(kind).parameters
        made = kind(config, **({"add_pooling_layer": pooler} if has_pooler else {})).eval()
        generator = torch.Generator().manual_seed(self.seed)
        for p in made.parameters():
            mean, deviation = (0.0, 0.15) if p.dim() > 1 else (0.5, 0.2)
            nn.init.normal_(p, mean, deviation, generator=generator)
        return made

    def padded(self, side: str = "right", *, texts: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """ids and mask [B, S]."""
        given = self.texts if texts is None else texts
        longest = max(map(len, given))
        rows = [(PAD, longest - len(text)) for text in given]
        ids = [torch.cat([text, text.new_full((more,), pad)]) for text, (pad, more) in zip(given, rows, strict=True)]
        ids = ids if side == "right" else [torch.cat([i[len(t) :], t]) for i, t in zip(ids, given, strict=True)]
        mask = torch.arange(longest)[None] < torch.tensor([len(text) for text in given])[:, None]
        return torch.stack(ids), (mask if side == "right" else mask.flip(1)).long()

    def flattened(self, texts: list[Tensor]) -> dict[str, Tensor | int]:
        """One row that holds all texts, as transformers' collator makes it."""
        lengths = [len(text) for text in texts]
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(n) + self.row.positions_from for n in lengths])
        row: dict[str, Tensor | int] = {"input_ids": torch.cat(texts)[None]}
        if self.row.base != "T5EncoderModel":  # it takes no positions
            row["position_ids"] = positions[None]
        return row | {
            "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(lengths), "max_length_k": max(lengths),
        }  # fmt: skip

    def labels(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Some words, and nothing at padding, at its neighbours and at the start of a text."""
        drawn = torch.randint(0, self.config.vocab_size, ids.shape, generator=self.generator)
        before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
        skipped = torch.rand(ids.shape, generator=self.generator) < 0.2
        return drawn.masked_fill((mask == 0) | (before == 0) | skipped, IGNORED)


# ---- against Hugging Face --------------------------------------------------------------------------------------------


def outputs(case: Case) -> None:
    """Hidden states of eager Hugging Face on real positions: no padding, on the right, on the left, an empty row."""
    model = case.model()
    packed = weft.pack(model)
    whole = case.texts[0][None]
    ids, mask = case.padded()
    empty = mask.clone()
    empty[1] = 0
    for name, given, real in (
        ("no padding", whole, torch.ones_like(whole)), ("right", ids, mask), ("left", *case.padded("left")),
        ("an empty row", ids, empty),
    ):  # fmt: skip
        for with_gradients in (False, True):
            with torch.set_grad_enabled(with_gradients):
                want, got = (m(given, attention_mask=real)[0].detach() for m in (model, packed))
            close(got[real.bool()], want[real.bool()], f"states, {name}, gradients {with_gradients}")
            assert not got[real == 0].any(), f"{name}: padding is not zero"
    model = case.model(pooler=True)
    with torch.no_grad():
        want, got = (m(ids, attention_mask=mask).get("pooler_output") for m in (model, weft.pack(model)))
    assert (want is None) == (got is None)
    if got is not None:
        close(got, want, "what the pooler gives")


def gradients(case: Case) -> None:
    """The loss and the gradients of all parameters, of the model with logits of words where there is one.

    Some models turn one rounding into more than is allowed. Where Hugging Face's own gradient is too far, the same
    model in float64 is the judge: the packed one must be as close to that, or closer than Hugging Face is.
    """
    model = case.model(case.row.words)
    ids, mask = case.padded()
    labels = case.labels(ids, mask)
    (want_loss, want), (got_loss, got) = (
        loss_and_gradients(case, model, each, ids, mask, labels) for each in (model, weft.pack(model))
    )
    close(got_loss, want_loss, "the loss")
    assert want.keys() == got.keys(), want.keys() ^ got.keys()
    limits = gradient_limits(want)
    if far := [name for name in want if distance(got[name], want[name]) > limits[name]]:
        exact_model = case.model(case.row.words).double()
        with InFloat64():
            _, exact = loss_and_gradients(case, exact_model, exact_model, ids, mask, labels)
        check_by_exact(got, want, exact, {name: limits[name] for name in far})


def gradient_limits(want: dict[str, Tensor]) -> dict[str, float]:
    largest = max(float(g.abs().max()) for g in want.values())
    # That of a bias of keys is 0 but for rounding.
    return {name: CLOSE * (float(g.abs().max()) + 0.01 * largest) for name, g in want.items()}


def loss_and_gradients(
    case: Case, model: Any, called: Any, ids: Tensor, mask: Tensor, labels: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Of a model, when it, or a twin that shares its parameters, is `called`."""
    model.zero_grad()
    loss = loss_of(case, called, ids, mask, labels)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_of(case: Case, model: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    if case.row.words is not None:
        loss: Tensor = model(ids, attention_mask=mask, labels=labels).loss
        return loss
    weights = torch.Generator().manual_seed(1)
    states: Tensor = model(ids, attention_mask=mask)[0]
    random = torch.randn(states.shape, generator=weights) * mask[..., None]
    return (states * random).sum() / random.numel()


def tokens(case: Case) -> None:
    """Greedy tokens of `weft.generate` are those of Hugging Face's `generate`; in a batch, and of one prompt alone."""
    if not case.row.generates:
        return
    model = case.model(case.row.words)
    prompts = [text[: POSITIONS - NEW].tolist() for text in case.texts]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD, "max_new_tokens": NEW}
    if getattr(case.config, "sliding_window", None) == 1:  # of which transformers' cache makes one without end
        options["use_cache"] = False
    want = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    shared = weft.parallelize(case.model(case.row.words), init_device_mesh("cpu", (1,)))
    got = weft.generate(shared, prompts, max_new_tokens=NEW, eos=())
    for prompt, a, b in zip(prompts, got, want, strict=True):
        assert a == b or is_tie(model, prompt, a, b), f"{prompt} is followed by {a}, expected {b}"
    assert weft.generate(shared, prompts[1:2], max_new_tokens=NEW, eos=()) == got[1:2]
    ids, mask = case.padded("left")
    both = [m.generate(ids, attention_mask=mask, **options) for m in (weft.pack(model), model)]
    assert torch.equal(*both), "tokens of the packed model"


def is_tie(model: Any, prompt: list[int], a: list[int], b: list[int]) -> bool:
    """Whether two tokens are as good as each other where the lists part."""
    at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + b[:at]])).logits[0, -1]
    return abs(float(logits[a[at]] - logits[b[at]])) < CLOSE


def types(case: Case) -> None:
    """Types of tokens, which any tokenizer may give: ignored where Hugging Face ignores them, else heeded."""
    ids, mask = case.padded()
    drawn = torch.randint(0, 2, ids.shape, generator=case.generator)
    drawn[0, 0] = 1
    for name in case.row.family.classes:
        if case.row.both_ways and name != case.row.base:
            continue
        model = case.model(name)
        packed = weft.pack(model)
        with torch.no_grad():
            plain, own = (m(ids, attention_mask=mask)[0] for m in (model, packed))
            try:
                want = model(ids, attention_mask=mask, token_type_ids=drawn)[0]
            except IndexError:  # it knows one type only
                with pytest.raises(ValueError, match="token_type_ids: values out of range"):
                    packed(ids, attention_mask=mask, token_type_ids=drawn)
                continue
            if torch.equal(want, plain):
                assert torch.equal(packed(ids, attention_mask=mask, token_type_ids=drawn)[0], own), name
            elif case.row.base == "GPT2Model":  # words stand for types there
                with pytest.raises(Unsupported, match="the argument token_type_ids is not supported"):
                    packed(ids, attention_mask=mask, token_type_ids=drawn)
            else:
                got, is_real = packed(ids, attention_mask=mask, token_type_ids=drawn)[0], mask.bool()
                by_token = want.shape[:2] == mask.shape
                close(got[is_real] if by_token else got, want[is_real] if by_token else want, f"{name} with types")


def registry(case: Case) -> None:
    """`attn_implementation="weft"` in the model's own code: its numbers. Or that code asks nobody for its attention."""
    model, other = case.model(), case.model()
    weft.register_attention()
    other.set_attn_implementation("weft")
    ids, mask = case.padded()
    if model._supports_attention_backend and not case.row.both_ways:  # whose mask is a function of its own
        for given, real in ((ids, mask), case.padded("left")):
            with torch.no_grad():
                want, got = (m(given, attention_mask=real)[0] for m in (model, other))
            close(got[real.bool()], want[real.bool()], "states by the registry")
    elif other.config._attn_implementation == "weft":
        with pytest.raises(Unsupported):
            other(ids, attention_mask=mask)


# ---- weft's own forms ------------------------------------------------------------------------------------------------


def forms(case: Case) -> None:
    """A text has the same bits alone, padded, packed and in a flattened row, whatever is beside it."""
    packed = weft.pack(case.model())
    for with_gradients in (False, True):
        with torch.set_grad_enabled(with_gradients):
            alone = [packed(text[None])[0][0].detach() for text in case.texts]
            for texts, expected in ((case.texts, alone), (case.texts[::-1], alone[::-1]), (case.texts[1:], alone[1:])):
                for form, states in in_all_forms(case, packed, texts):
                    for i, (got, want) in enumerate(zip(states, expected, strict=True)):
                        assert torch.equal(got, want), f"text {i}, {form}, gradients {with_gradients}"


def in_all_forms(case: Case, packed: Any, texts: list[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    lengths = [len(text) for text in texts]
    ids, mask = case.padded(texts=texts)
    states = packed(ids, attention_mask=mask)[0].detach()
    yield "padded", [s[:n] for s, n in zip(states, lengths, strict=True)]
    yield "packed", list(packed(weft.PackedBatch.from_list(texts))[0].detach().split(lengths))
    row = case.flattened(texts)
    yield "flattened", list(packed(**row)[0][0].detach().split(lengths))
    if case.row.generates:
        fewer = {name: row[name] for name in ("input_ids", "position_ids")}
        yield "flattened by positions", list(packed(**fewer, use_cache=False)[0][0].detach().split(lengths))


def others(case: Case) -> None:
    """Another text, of another length, leaves the bits of all others."""
    packed = weft.pack(case.model())
    at = case.random.randrange(len(case.texts))
    changed = list(case.texts)
    length = len(changed[at]) + case.random.choice((-1, 0, 3)) or 2
    while torch.equal(changed[at], case.texts[at]):
        changed[at] = case.text(length)
    with torch.no_grad():
        before, after = (dict(in_all_forms(case, packed, texts)) for texts in (case.texts, changed))
    for form, states in before.items():
        for i, (a, b) in enumerate(zip(states, after[form], strict=True)):
            same = a.shape == b.shape and torch.equal(a, b)
            assert same == (i != at), f"text {i} after a change of text {at}, {form}"


def dropouts(case: Case) -> None:
    """Training drops by torch's generator: a seed repeats a step, and another drops something else."""
    packed = weft.pack(case.model()).train()
    ids, mask = case.padded()

    def states(seed: int) -> Tensor:
        torch.manual_seed(seed)
        found: Tensor = packed(ids, attention_mask=mask)[0].detach()
        return found

    first = states(1)
    assert torch.equal(first, states(1)), "a seed does not repeat the step"
    rates = [m.p for m in packed.modules() if isinstance(m, nn.Dropout)]
    rates += [getattr(m, "attention_dropout", 0.0) for m in packed.modules()]
    drops = any(isinstance(rate, float) and rate > 0 for rate in rates)
    plain = packed.eval()(ids, attention_mask=mask)[0].detach()
    assert torch.equal(first, plain) != drops, f"dropouts {sorted(set(map(str, rates)))}"


ALONE: dict[str, Callable[[Case], None]] = {
    check.__name__: check for check in (outputs, gradients, types, tokens, registry, forms, others, dropouts)
}


# ---- on ranks --------------------------------------------------------------------------------------------------------


def losses_on_ranks(cases: list[tuple[str, int, int]]) -> list[str]:
    """Two losses with a step between, on all ranks, beside those of one; and that of a model in stages.

    Returns what was wrong, for every case.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrong = []
    for name, seed, number in cases:
        case = Case(name, seed, number, ranks=mesh.size())
        ids, mask = case.padded()
        labels = case.labels(ids, mask)
        alone = case.model(case.row.words)
        shared = weft.parallelize(case.model(case.row.words), mesh)
        first = loss_of(case, alone, ids, mask, labels).item()
        want, got = (steps(case, model, ids, mask, labels) for model in (alone, shared))
        if case.row.family.stages is not None and case.row.words is not None:
            want, got = [*want, first], [*got, loss_in_stages(case, mesh, ids, mask, labels)]
        far = [f"{g:.6f} instead of {w:.6f}" for g, w in zip(got, want, strict=True) if not abs(g - w) <= LOSSES_CLOSE]
        if far:
            wrong.append(f"{name} seed {seed} case {number}: losses {', '.join(far)}; {case.config}")
    return wrong


def loss_in_stages(case: Case, mesh: DeviceMesh, ids: Tensor, mask: Tensor, labels: Tensor) -> float:
    """The loss of a model that is cut into stages, one after the other on the same ranks."""
    case.config.attention_dropout = 0.0
    count = 1 if case.config.tie_word_embeddings else min(2, case.config.num_hidden_layers)
    batch = weft.PackedBatch.from_padded(ids, mask)
    following = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    rows = batch.values
    for index in range(count):
        stage = model_stage(case.model(case.row.words), index, count, mesh)
        following_ids = batch.gather(following) if index == count - 1 else None
        rows = stage(rows, cu_seqlens=batch.cu_seqlens, next_ids=following_ids)
    return float(rows.detach()) / int((following != IGNORED).sum())


def steps(case: Case, model: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> list[float]:
    optimiser, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(2):
        loss = loss_of(case, model, ids, mask, labels)
        losses.append(float(loss.detach()))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return losses


def close(got: Tensor, want: Tensor, what: str, limit: float = CLOSE) -> None:
    assert got.shape == want.shape, f"{what}: {list(got.shape)}, expected {list(want.shape)}"
    error = distance(got, want)
    assert error <= limit, f"{what} differ by {error:.2e}, may by {limit:.2e}"


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
