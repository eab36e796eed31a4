"""Prints how much of the communication of a train step lies inside its backward pass.

    python -m tests.long.overlap --steps 20

Each line is one worker's step. The backward pass ends with the gradient of the input, which needs
those of all activations. The last bucket is left out, because nothing is left to hide it.

``--how`` chooses between the backward hook, ``jaxhetero.replicated``, and ``jaxhetero.psum`` of the gradients. With
``--late-s 3`` every worker begins its step 3 s after the one before it. Then a line says what the first worker, which
has to wait, gets done meanwhile.
"""

import statistics
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from tests.support.cluster import run

LAYERS = 8

How = Literal["replicated", "psum"]


@dataclass(frozen=True)
class Step:
    """One worker's: its rounds in the order in which they were asked for, and when the backward pass was over."""

    rounds: list[dict[str, Any]]
    backward_end_s: float

    @property
    def communication_s(self) -> float:
        """From first byte to last, of all rounds but the last."""
        return sum(times["end_s"] - times["first_push_s"] for times in self.rounds[:-1])

    @property
    def hidden_s(self) -> float:
        """What of it lies inside the backward pass."""
        ends = [min(times["end_s"], self.backward_end_s) for times in self.rounds[:-1]]
        return sum(max(0.0, end - times["first_push_s"]) for end, times in zip(ends, self.rounds[:-1], strict=True))

    @property
    def hidden_share(self) -> float:
        return self.hidden_s / self.communication_s

    @property
    def asked_for_count(self) -> int:
        """Rounds, when the first of them was over."""
        first_end_s = min(times["end_s"] for times in self.rounds)
        return sum(times["requested_s"] < first_end_s for times in self.rounds)

    @property
    def waited_s(self) -> float:
        """From the end of the backward pass to that of the first round."""
        return float(self.rounds[0]["end_s"] - self.backward_end_s)


def measure(
    workers: int = 2, reducers: int = 1, steps: int = 1, late_s: float = 0, how: How = "replicated"
) -> list[list[Step]]:
    """The steps of every worker, by rank."""
    results = run("overlap.py", str(steps + 1), str(late_s), how, workers=workers, reducers=reducers)
    return [
        [
            Step(sorted(step["rounds"], key=lambda times: times["requested_s"]), step["backward_end_s"])
            for step in result
        ]
        for result in results
    ]


def describe(step: Step) -> str:
    return (
        f"{step.hidden_share:.1%} of the {1e3 * step.communication_s:.1f} ms of communication of "
        "all buckets but the last lay inside backward"
    )


def describe_waiting(step: Step) -> str:
    return (
        f"{step.asked_for_count} of {len(step.rounds)} rounds were asked for when the first was over; the backward "
        f"pass was over {1e3 * step.waited_s:.1f} ms before that"
    )


def main(workers: int = 2, reducers: int = 1, steps: int = 1, late_s: float = 0, how: How = "replicated") -> None:
    """
    Args:
        workers: How many, on this machine.
        reducers: How many, likewise.
        steps: How many.
        late_s: By how much every worker is later than the one before it.
        how: By which of the two the gradients are reduced.
    """
    by_rank = measure(workers, reducers, steps, late_s, how)
    for rank, steps_of_rank in enumerate(by_rank[:1] if late_s else by_rank):
        for step in steps_of_rank:
            print(f"rank {rank}: {describe_waiting(step) if late_s else describe(step)}")
    if not late_s:
        median = statistics.median(step.hidden_share for steps_of_rank in by_rank for step in steps_of_rank)
        print(f"median {median:.1%}")


if __name__ == "__main__":
    tyro.cli(main)
