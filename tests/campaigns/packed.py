"""Random packed models beside the same models of Hugging Face: any call, any mask, any mode, and surgery on the modules
between calls. Each answer is that of the model itself, or the call is refused by name.

    python tests/campaigns/packed.py --cases 1000 --seed 1
"""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
import traceback
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import packed_parts as parts
import packed_surgery
import torch
import transformers
from campaign import Tally, case_random, main
from packed_surgery import Patient

from weft.packed import PackedBatch, pack

# Why a call may be refused for what it brings; anything else that is raised is a failure.
REFUSALS = [
    "the pooler reads the first column", r"For\w+ reads the first column", r"For\w+ reads column \d+ of row",
    "start_positions: the loss of", "the mask has holes and the model has sliding windows",
    "would be predicted from padding or from that text", "position_ids restart inside of a text",
    "rows hold several", "labels of padding must be -100", "more positions than the model has",
]  # fmt: skip
FLOAT32 = {"atol": 2e-5, "rtol": 2e-4}
ROUGH = {"atol": 0.25, "rtol": 0.25}


class Wrong(AssertionError):
    """An answer that is not the model's, or a refusal that should not be."""


def outputs_of(output: Any, model: Any, real: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every number that a call returns for real tokens, by name."""
    name = type(model).__name__
    if isinstance(output, tuple):
        fields = [(str(i), value) for i, value in enumerate(output)]
    else:
        fields = [(key, value) for key, value in output.items() if key != "past_key_values"]
    found: dict[str, torch.Tensor] = {}
    for key, value in fields:
        many = value if isinstance(value, tuple) else (value,)
        for i, t in enumerate(many):
            if isinstance(t, torch.Tensor):
                by_token = t.dim() == 3 or (t.dim() == 2 and "QuestionAnswering" in name)
                found[f"{key}.{i}"] = t[real] if by_token else t
                if key == "pooler_output" or (key == "1" and not by_token and t.dim() == 2):
                    found[f"{key}.{i}"] = t[real.any(1)]  # of no text it is zeros
    return found


def scalar_of(output: Any, found: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
    """What is differentiated: the loss, or a sum of all numbers with random weights."""
    loss = None if isinstance(output, tuple) else output.get("loss")
    if loss is not None:
        return loss  # type: ignore[no-any-return]
    generator = torch.Generator().manual_seed(seed)
    return sum((t * torch.randn(t.shape, generator=generator)).sum() for t in found.values())  # type: ignore[return-value]


def answer(model: Any, call: dict[str, Any], real: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
    """What a model returns for real tokens and, with gradients, what they are."""
    embeds = call.get("inputs_embeds")
    if mode in ("no_grad", "inference", "autocast"):
        context = torch.inference_mode() if mode == "inference" else torch.no_grad()
        with context, torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            return {k: t.detach().clone().float() for k, t in outputs_of(model(**call), model, real).items()}
    model.zero_grad(set_to_none=True)
    if embeds is not None:
        call = {**call, "inputs_embeds": embeds.detach().clone().requires_grad_()}
    if mode == "checkpoint":
        holder: list[Any] = []

        def run(*_: torch.Tensor) -> torch.Tensor:
            output = model(**call)
            holder[:] = [output]
            return scalar_of(output, outputs_of(output, model, real), 7)

        start = torch.zeros((), requires_grad=True)
        scalar = torch.utils.checkpoint.checkpoint(run, start, use_reentrant=False)
        found = outputs_of(holder[0], model, real)
    else:
        output = model(**call)
        found = outputs_of(output, model, real)
        scalar = scalar_of(output, found, 7)
    found = {k: t.detach().clone() for k, t in found.items()}
    if scalar.requires_grad and bool(scalar.isfinite()):
        scalar.backward()  # type: ignore[no-untyped-call]
        grads = {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        if embeds is not None:
            grads["grad embeds"] = call["inputs_embeds"].grad[real]
        found.update({k: t.detach().clone() for k, t in grads.items()})
    return found


def compare(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], call: dict[str, Any], rough: bool) -> None:
    if got.keys() != want.keys():
        # A parameter that no real token reaches has no gradient here, and one of zeros there.
        odd = [k for k in want.keys() ^ got.keys() if not (k in want and k.startswith("grad") and not want[k].any())]
        if odd:
            raise Wrong(f"other outputs or gradients: {odd}")
    for key, t in got.items():
        options = ROUGH if rough else dict(FLOAT32)
        if key.startswith("grad") or rough:
            like = [w for k, w in want.items() if w.numel() and (k == key or k.startswith("grad"))]
            scale = max((float(w.nan_to_num().abs().max()) for w in like), default=0.0)
            least = 0.1 if rough else 1e-2  # a single logit near zero is a sum of terms that were rounded
            options = {"atol": (0.1 if rough else 1e-4) * max(scale, least), "rtol": 0.3 if rough else 2e-3}
        try:
            torch.testing.assert_close(t.float(), want[key].float(), equal_nan=True, **options)
        except AssertionError as error:
            raise Wrong(f"{key}: {error}") from None


def refused(error: ValueError, patient: Patient, simple: bool) -> None:
    """Takes a refusal for an answer, or raises."""
    text = str(error)
    if patient.expects is not None and re.search(patient.expects, text):
        return
    if not any(re.search(pattern, text) for pattern in REFUSALS):
        raise Wrong(f"refused for a reason that nobody knows: {text}") from error
    if simple and "start_positions" not in text:
        raise Wrong(f"a plain call was refused: {text}") from error


def one_call(r: Random, patient: Patient, family: str, head: str, tally: dict[str, int]) -> str:
    """A random call of the model and of the packed one."""
    model, packed = patient.model, patient.packed
    call, real = parts.call_of(r, family, head, model)
    modes = ["no_grad", "no_grad", "inference", "grad", "grad", "checkpoint", "autocast"]
    mode = r.choice(modes) if not patient.rough else r.choice(modes[:3])
    if "past_key_values" in call or (family in parts.DECODERS and (mode != "no_grad" or "position_ids" in call)):
        call["use_cache"] = False  # a row of several texts is one to Hugging Face's cache
    if "return_dict" in call and family in parts.DECODERS:
        call["use_cache"] = False
    shown = {k: list(v.shape) if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    what = f"{mode} {shown} real {real.sum(1).tolist()}"
    state = torch.get_rng_state()
    try:
        want = answer(model, parts.told_apart(family, model, call), real, "no_grad" if mode == "autocast" else mode)
    except Exception:
        if patient.expects is None:
            tally["the model itself raised"] += 1
            return what
        want = {}
    torch.set_rng_state(state)
    simple = patient.expects is None and "position_ids" not in call and bool(
        (real.sum(1) > 0).all() and (real[:, :1].all()) and (real[:, :-1] | ~real[:, 1:]).all()
    )  # fmt: skip
    if simple and family in parts.DECODERS:
        simple = (
            bool((call["input_ids"] == model.config.pad_token_id).eq(~real).all()) if "input_ids" in call else False
        )
    try:
        got = answer(packed, dict(call), real, mode)
    except ValueError as error:
        refused(error, patient, simple)
        tally["refused"] += 1
        return what
    if patient.expects is not None and not patient.may_work:
        raise Wrong(f"must be refused ({patient.expects}), and was computed: {what}")
    try:
        compare(got, want, call, rough=patient.rough or mode == "autocast")
    except Wrong as error:
        raise Wrong(f"{error}\n{what}") from None
    tally["compared"] += 1
    if mode == "no_grad" and r.random() < 0.3:
        also(r, patient, head, call, real, got)
    return what


def also(
    r: Random, patient: Patient, head: str, call: dict[str, Any], real: torch.Tensor, got: dict[str, torch.Tensor]
) -> None:
    """The same call from two threads, or as a `PackedBatch`: the same bits."""
    if r.random() < 0.5:
        found: list[dict[str, torch.Tensor]] = []
        calls = [lambda: found.append(answer(patient.packed, dict(call), real, "no_grad")) for _ in range(2)]
        threads = [threading.Thread(target=call) for call in calls]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if len(found) != 2 or any(not torch.equal(f[k], got[k]) for f in found for k in got if f[k].isfinite().all()):
            raise Wrong("two threads at once get something else")
        return
    is_plain = set(call) <= {"input_ids", "attention_mask", "use_cache"} and bool((real[:, 1:] <= real[:, :-1]).all())
    if is_plain and head in ("Model", "LMHeadModel", "ForCausalLM"):  # columns count as in a list of texts
        batch = PackedBatch.from_list([row[kept] for row, kept in zip(call["input_ids"], real, strict=True)])
        with torch.no_grad():
            output = patient.packed(batch)
        key = "last_hidden_state" if head == "Model" else "logits"
        if not torch.equal(output[key], got[f"{key}.0"]):
            raise Wrong("a PackedBatch gives something else than the padded call")


def run_case(r: Random, tally: dict[str, int]) -> None:
    family = r.choice(list(parts.HEADS))
    head = r.choice(parts.HEADS[family])
    model = parts.build(r, family, head)
    patient = Patient(model, pack(model))
    done = [f"{family}{head} {model.config._attn_implementation}"]
    try:
        for _ in range(r.randint(1, 4)):
            treatment = r.choice(packed_surgery.TREATMENTS)
            done.append(treatment.__name__)
            undo: Callable[[], None] | None = treatment(r, patient)
            done.append(one_call(r, patient, family, head, tally))
            if undo is not None:
                undo()
                patient.recover()
                done.append(one_call(r, patient, family, head, tally))
    except Exception as error:
        story = "\n    ".join(done)
        kind = "" if isinstance(error, Wrong) else traceback.format_exc()
        raise Wrong(f"    {story}\n    {type(error).__name__}: {error}\n{kind}") from None


def part(arguments: tuple[int, int, int]) -> tuple[int, list[str], dict[str, int]]:
    """A run of cases in one process."""
    seed, first, cases = arguments
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    failures, tally = [], dict.fromkeys(("compared", "refused", "the model itself raised"), 0)
    for number in range(first, first + cases):
        try:
            run_case(case_random(seed, number), tally)
        except Wrong as error:
            failures.append(f"case {number} of seed {seed}:\n{error}")
    return cases, failures, tally


def campaign(seed: int, first: int, cases: int) -> Tally:
    """The cases, over as many processes as there are cores; torch is imported once, and has started no threads yet."""
    processes = min(len(os.sched_getaffinity(0)), max(cases // 20, 1))
    size = max(1, min(50, -(-cases // processes)))
    jobs = [(seed, at, min(size, first + cases - at)) for at in range(first, first + cases, size)]
    tally, counts = Tally("packed", seed), dict.fromkeys(("compared", "refused", "the model itself raised"), 0)
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for done, failures, counted in pool.imap(part, jobs):
            tally.cases += done
            tally.failures += failures
            counts = {key: counts[key] + counted[key] for key in counts}
    print(", ".join(f"{key} {value}" for key, value in counts.items()))
    return tally


if __name__ == "__main__":
    main(campaign)
