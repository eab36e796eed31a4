"""Schedules: every task once, in an order that can run, with the bubble and the memory that are known for each."""

from collections import Counter

import pytest

from jaxhetero.errors import ConfigError
from jaxhetero.pipeline.schedules import NAMES, Schedule, ScheduleName, Task, TaskKind, make_schedule
from jaxhetero.pipeline.simulation import Interconnect, simulate

SIZES = [(2, 4), (4, 8), (8, 32)]


def several(name: ScheduleName) -> tuple[int, ...]:
    return (2, 4) if name in ("virtual", "breadth_first") else (1,)


SCHEDULES = [(name, p, v, m) for name in NAMES for v in several(name) for p, m in SIZES]


def seconds(schedule: Schedule, task: Task) -> float:
    """A step of one microbatch takes 3 seconds a worker."""
    whole = {TaskKind.FORWARD: 1.0, TaskKind.BACKWARD: 1.0 if schedule.is_parted else 2.0, TaskKind.WEIGHTS: 1.0}
    return whole[task.kind] / schedule.stages_per_place


@pytest.mark.parametrize(("name", "places", "stages", "microbatches"), SCHEDULES)
def test_every_task_runs_once(name: ScheduleName, places: int, stages: int, microbatches: int) -> None:
    schedule = make_schedule(name, places, stages, microbatches)
    counts = Counter(task for tasks in schedule.tasks for task in tasks)
    kinds = [TaskKind.FORWARD, TaskKind.BACKWARD, *([TaskKind.WEIGHTS] if name == "zero_bubble" else [])]
    wanted = {Task(kind, s, number) for kind in kinds for s in range(places * stages) for number in range(microbatches)}
    assert counts == dict.fromkeys(wanted, 1)
    assert all(task.stage % places == place for place, tasks in enumerate(schedule.tasks) for task in tasks)


@pytest.mark.parametrize(("name", "places", "stages", "microbatches"), SCHEDULES)
def test_the_microbatches_of_a_stage_come_in_order(
    name: ScheduleName, places: int, stages: int, microbatches: int
) -> None:
    """State passes from one microbatch to the next, and messages of one kind are in order."""
    schedule = make_schedule(name, places, stages, microbatches)
    for tasks in schedule.tasks:
        for kind in TaskKind:
            for stage in range(schedule.stage_count):
                numbers = [task.microbatch for task in tasks if (task.kind, task.stage) == (kind, stage)]
                assert numbers == sorted(numbers)


@pytest.mark.parametrize(("name", "places", "stages", "microbatches"), SCHEDULES)
def test_the_bubble_is_the_known_one(name: ScheduleName, places: int, stages: int, microbatches: int) -> None:
    schedule = make_schedule(name, places, stages, microbatches)
    step = simulate(schedule, lambda task: seconds(schedule, task))
    tasks_of_a_microbatch = 3 if name == "zero_bubble" else stages
    bubble = (places - 1) / (tasks_of_a_microbatch * microbatches + places - 1)
    assert step.bubble == pytest.approx(bubble, abs=1e-12)
    assert step.busy_s == pytest.approx([3.0 * microbatches] * places)


@pytest.mark.parametrize(("places", "microbatches"), SIZES)
def test_activations_that_are_kept(places: int, microbatches: int) -> None:
    def held(name: ScheduleName, stages: int = 1) -> tuple[int, ...]:
        return make_schedule(name, places, stages, microbatches).held()

    assert held("simple") == (microbatches,) * places
    assert held("interleaved") == tuple(min(microbatches, places - place) for place in range(places))
    assert held("zero_bubble") == (min(microbatches, places),) * places
    assert held("breadth_first", 2) == (microbatches,) * 2 * places


def test_a_worker_may_be_slow() -> None:
    """The step is then bound by that worker."""
    schedule = make_schedule("interleaved", 4, 1, 32)
    slow = simulate(schedule, lambda task: seconds(schedule, task) * (2 if task.stage == 1 else 1))
    assert 2 * 3 * 32 <= slow.step_s <= 2 * 3 * (32 + 3)


def test_transfers_and_reductions_take_their_time() -> None:
    schedule = make_schedule("interleaved", 2, 1, 4)
    alone = simulate(schedule, lambda task: seconds(schedule, task)).step_s
    network = Interconnect(bytes_per_s=100.0, latency_s=0.5)
    # One microbatch in the pipeline at a time would pay both ways each time; in turns only some of it is seen.
    assert simulate(schedule, lambda task: seconds(schedule, task), {(0, 1): 50.0}, network).step_s > alone
    reduced = simulate(schedule, lambda task: seconds(schedule, task), reduce_s=lambda stage: 10.0 + stage)
    assert reduced.compute_s == alone
    assert reduced.step_s == alone + 10.0  # the first stage is the last to end


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simple", 4, 2, 8), "one stage a worker"),
        (("virtual", 4, 2, 6), "multiple of 4 microbatches"),
        (("1f1b", 4, 1, 8), "must be one of simple, interleaved"),
    ],
)
def test_what_a_schedule_is_not_for(arguments: tuple[ScheduleName, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_schedule(*arguments)
