"""The rows of one place of `weft bench end_to_end` on the ranks of its lab: systems in turns, and one traced call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from weft import tracing
from weft.bench.end_to_end_calibrate import rank_mesh
from weft.bench.end_to_end_cases import Kind, Load, Place
from weft.bench.end_to_end_infer import NO_OVERLAP, PLAIN, Engines, Generate, check_tokens, make_systems
from weft.bench.end_to_end_inputs import token_lists, train_batch
from weft.bench.end_to_end_timeline import exposed_fraction, predicted_step
from weft.bench.end_to_end_train import SYSTEMS, Form, Trainer, check_losses, first_losses, make_trainers
from weft.bench.harness import Case, Measurement
from weft.bench.ranks import measure_ranks, slowest, start_together
from weft.lab import Rank
from weft.timeline import Timeline

Call = Callable[[], object]
FIRST = "_first"  # ends the name of a system that stops after the first token
DECODE_SEED = 1


@dataclass(frozen=True)
class Outcome:
    """What a row gave: times; the part of weft's time that was communication in plain sight; a call as it was.

    `predicted` is the same call as the plans promised it; None where no op was traced.
    """

    measured: Measurement
    exposed: float | None
    happened: Timeline
    predicted: Timeline | None


def measure_train(rank: Rank, place: Place, load: Load, rounds: int, names: Sequence[str]) -> Outcome:
    """Training steps by the systems of these names; losses must agree."""
    batch = train_batch(load.train_lengths, place.size.vocabulary, multiple=place.ranks)
    trainers = make_trainers(place.size, batch, rank_mesh(rank), {SYSTEMS[name].trainer for name in names})
    check_losses(first_losses(trainers))
    calls = {name: _step(trainers[SYSTEMS[name].trainer], SYSTEMS[name].form) for name in names}
    # Every trainer has made a step in each form.
    measured = measure_ranks(Case(f"train: {place.name}", calls), rank, rounds, warmup=0)
    return _traced(calls["weft"], rank, measured)


def measure_generate(
    rank: Rank,
    place: Place,
    load: Load,
    rounds: int,
    kinds: Sequence[Kind],
    folder: str,
    engines: Engines | None,
    promises: bool,
) -> dict[Kind, Outcome]:
    """Prefill, decoding or both; tokens must agree. With `promises`, prefill is also measured without overlap."""
    with ExitStack() as stack:
        systems = make_systems(place.size, rank_mesh(rank), folder, engines, stack, promises=promises)
        found = {}
        for kind in kinds:
            names = [*(engines.names if engines else ()), *PLAIN[kind]]
            names += [NO_OVERLAP] if promises and kind is Kind.PREFILL else []
            found[kind] = _generations(rank, place, load, rounds, kind, {name: systems[name] for name in names})
        return found


def _generations(
    rank: Rank, place: Place, load: Load, rounds: int, kind: Kind, systems: Mapping[str, Generate]
) -> Outcome:
    vocabulary = place.size.vocabulary
    if kind is Kind.PREFILL:
        prompts, tokens = token_lists(load.prompt_lengths, vocabulary), 1
    else:
        prompts, tokens = token_lists(load.decode_lengths, vocabulary, seed=DECODE_SEED), load.new_tokens + 1
    answers = {name: generate(prompts, tokens) for name, generate in systems.items()}
    check_tokens({name: found for name, found in answers.items() if found})  # of the systems that this rank is part of
    calls = {name: _generation(generate, prompts, tokens) for name, generate in systems.items()}
    if kind is Kind.DECODE:
        calls |= {name + FIRST: _generation(generate, prompts, 1) for name, generate in systems.items()}
    measured = measure_ranks(Case(f"{kind.value}: {place.name}", calls), rank, rounds, warmup=0)
    return _traced(calls["weft"], rank, measured)


def _step(trainer: Trainer, form: Form) -> Call:
    return lambda: trainer.step(form)


def _generation(generate: Generate, prompts: list[list[int]], tokens: int) -> Call:
    return lambda: generate(prompts, tokens)


def _traced(call: Call, rank: Rank, measured: Measurement) -> Outcome:
    start_together()
    start = tracing.now()
    with tracing.trace() as trace:
        call()
    seconds = slowest(tracing.now() - start)
    happened = Timeline(trace.gather(group=rank.group).events, name="measured")
    predicted = predicted_step(trace.calls, happened)
    return Outcome(measured, exposed_fraction(happened, rank.world, seconds), happened, predicted)
