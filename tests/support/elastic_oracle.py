"""What ``programs/elastic.py`` computes, in NumPy, given the history of the job: for each bucket its participants."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

import numpy as np

LEAVES = {"large": 200_000, "middle": 3_000, "small": 10}
RATE = np.float32(0.25)

State = dict[str, np.ndarray]


def first_state() -> State:
    return {name: np.zeros(count, np.float32) for name, count in LEAVES.items()}


def weight_of(rank: int, step: int) -> int:
    return 1 + (rank + step) % 3


def contribution(rank: int, step: int, name: str, state: State) -> np.ndarray:
    """What depends on the state, so that a wrong bit anywhere stays."""
    own = (np.arange(LEAVES[name], dtype=np.int32) * (rank + 3) + step) % 1009
    return own.astype(np.float32) - state[name] * RATE


def advance(state: State, means: State) -> State:
    return {name: state[name] + means[name] * RATE for name in state}


def replay(history: Sequence[dict[str, list[int]]]) -> State:
    """``history`` has for each step the ranks that have taken part, by leaf."""
    state = first_state()
    for step, participants in enumerate(history):
        means: State = {}
        for name, ranks in participants.items():
            total, weights = None, np.float32(0)
            for rank in ranks:
                weight = np.float32(weight_of(rank, step))
                part = contribution(rank, step, name, state) * weight
                total = part if total is None else total + part
                weights += weight
            assert total is not None
            means[name] = total * (np.float32(1) / weights)
        state = advance(state, means)
    return state


def history_of(lines: Iterable[str], steps: int) -> list[dict[str, list[int]]]:
    """What ``replay`` takes, from what the coordinator has written. Each leaf has a round in each step."""
    views = [json.loads(line) for line in lines]
    history: list[dict[str, list[int]]] = [{} for _ in range(steps)]
    for view in views:  # a later one says it for all rounds that were not complete when it began
        complete = {op["op"].split()[0]: op["complete"] for op in view["rounds"]}
        for name in LEAVES:
            for step in range(complete.get(name, 0), steps):
                history[step][name] = view["members"]
    return history


def digest(state: State) -> str:
    return hashlib.sha256(b"".join(state[name].tobytes() for name in sorted(state))).hexdigest()
