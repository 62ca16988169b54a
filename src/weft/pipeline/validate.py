"""Whether ranks could wait for each other in a circle, found by running the schedule in steps of equal length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from weft.pipeline.action import Action, Kind
from weft.pipeline.graph import StageGraph, chain
from weft.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Steps:
    """When each action runs if each takes one step and transfers take none.

    of:    the step of each action that can run
    stuck: for each rank that cannot finish, the action that it is stuck at
    """

    of: dict[Action, int]
    stuck: dict[int, Action]

    @cached_property
    def count(self) -> int:
        """How many steps there are."""
        return max(self.of.values(), default=-1) + 1


class Dependencies:
    """What must have been done before an action, by schedule and stage graph."""

    def __init__(self, schedule: Schedule, graph: StageGraph) -> None:
        self._schedule = schedule
        self._sources = {s: sorted({e.source for e in graph.into(s)}) for s in range(graph.stages)}
        self._users = {s: sorted({e.target for e in graph.out_of(s) if e.gradient}) for s in range(graph.stages)}

    def of(self, action: Action) -> list[Action]:
        """The actions that this one needs: of its own stage and of its neighbours in the graph."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return [Action(source, Kind.FORWARD, microbatch) for source in self._sources[stage]]
        if action.kind is Kind.WEIGHT_GRADIENT:
            return [Action(stage, Kind.INPUT_GRADIENT, microbatch)]
        return [
            Action(stage, Kind.FORWARD, microbatch),
            *(self.gradient(user, microbatch) for user in self._users[stage]),
        ]

    def gradient(self, stage: int, microbatch: int) -> Action:
        """The action of the stage that makes the gradient of its input."""
        split = self._schedule.splits_backward(stage, microbatch)
        return Action(stage, Kind.INPUT_GRADIENT if split else Kind.BACKWARD, microbatch)


def run_in_steps(schedule: Schedule, graph: StageGraph | None = None) -> Steps:
    """Runs the schedule in equal steps, as far as it goes; a plain chain without a graph."""
    dependencies = Dependencies(schedule, _graph_of(schedule, graph))
    done: dict[Action, int] = {}
    next_of = [0] * len(schedule.ranks)
    step = 0
    while True:
        ran = []
        for rank, actions in enumerate(schedule.ranks):
            if next_of[rank] < len(actions):
                action = actions[next_of[rank]]
                if all(needed in done for needed in dependencies.of(action)):
                    ran.append((rank, action))
        if not ran:
            break
        for rank, action in ran:  # after the loop above, so that a step sees only what earlier steps have done
            done[action] = step
            next_of[rank] += 1
        step += 1
    stuck = {r: a[next_of[r]] for r, a in enumerate(schedule.ranks) if next_of[r] < len(a)}
    return Steps(done, stuck)


def validate(schedule: Schedule, graph: StageGraph | None = None) -> Steps:
    """Raises if some rank would wait for ever; the message is the grid with the stuck cells in brackets.

    Missing, doubled and misplaced actions are refused by `Schedule` itself.

    >>> lists = ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"]
    >>> stuck = Schedule("mine", 2, 2, tuple(tuple(map(Action.parse, actions.split())) for actions in lists))
    >>> validate(stuck)
    Traceback (most recent call last):
    ...
    ValueError: schedule mine cannot finish: ranks wait for each other in a circle
    step  rank 0  rank 1
       0     0F0       .
       1   [0B0]   [1F1]
    rank 0 is stuck at 0B0, which needs 1B0: that comes 4th on rank 1
    rank 1 is stuck at 1F1, which needs 0F1: that comes 3rd on rank 0
    expected an order in which every action comes after those it needs; move those of a stuck rank
    """
    from weft.pipeline.text import format_stuck

    graph = _graph_of(schedule, graph)
    steps = run_in_steps(schedule, graph)
    if steps.stuck:
        dependencies = Dependencies(schedule, graph)
        needs = {
            rank: [needed for needed in dependencies.of(action) if needed not in steps.of]
            for rank, action in steps.stuck.items()
        }
        raise ValueError(format_stuck(schedule, steps, needs))
    return steps


def _graph_of(schedule: Schedule, graph: StageGraph | None) -> StageGraph:
    if graph is None:
        return chain(schedule.stages)
    if graph.stages != schedule.stages:
        raise ValueError(
            f"got a graph of {graph.stages} stages for a schedule of {schedule.stages}; expected the same number"
        )
    return graph
