"""``offload``: the collectives of jax.lax in every transformation and place, and what is refused."""

import re

import pytest

from tests.support.cluster import ROOT, free_port, run
from tests.support.programs_on_disk import FAST_COMPILATION

IN_GLOBAL_MESH = {"pmap": "`pmap`", "shard_map": "typed `shard_map`", "untyped shard_map": "untyped `shard_map`"}
PLACES = {"own jit": "plain `jit`", "own pmap": "own `pmap`", **IN_GLOBAL_MESH, "global jit": "global `jit`"}


def documented(place: str) -> dict[str, str]:
    """The column of ``place`` in the table of docs/parity.md, by transformation."""
    lines = (ROOT / "docs" / "parity.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    begin = next(index for index, row in enumerate(rows) if row[0] == "inside")
    column = rows[begin].index(PLACES[place])
    table = rows[begin + 2 :]
    return {row[0].replace("`", ""): row[column] for row in table[:14]}


def in_words(outcomes: dict[str, str]) -> str:
    """A cell of the table; what went wrong if there is none for it."""
    failed = {name: outcome for name, outcome in outcomes.items() if outcome != "holds"}
    sums_fail = {"psum", "pmean"} <= failed.keys()
    if not failed:
        return "all"
    if failed.keys() == {"pmax", "pmin"} and all(text.startswith("no derivative") for text in failed.values()):
        return "no extremes"
    if failed.keys() == {"pmax", "pmin", "all_gather", "psum_scatter"} and set(failed.values()) == {"no such type"}:
        return "sums"
    if sums_fail and all(failed[name].startswith("refused: ") for name in ("psum", "pmean")):
        return "refused"
    if sums_fail and all(failed[name].startswith("refused by JAX: ") for name in ("psum", "pmean")):
        return "JAX refuses"
    return str(failed)


@pytest.mark.parametrize("place", PLACES)
def test_the_table_of_places_is_true(place: str) -> None:
    coordinator = [f"127.0.0.1:{free_port()}"] if place in {*IN_GLOBAL_MESH, "global jit"} else []
    first, second = run("places.py", place, *coordinator, workers=2, reducers=1)
    for found in (first, second):
        assert {name: in_words(outcomes) for name, outcomes in found.items()} == documented(place)


@pytest.mark.parametrize("is_global", [False, True])
def test_no_form_of_offload_sums_inside_a_worker_in_silence(is_global: bool) -> None:
    """Every place, form and name: the true sum goes through reducers, or a name that nothing has is refused."""
    coordinator = [f"127.0.0.1:{free_port()}"] if is_global else []
    for found in run("forms.py", *coordinator, workers=2, reducers=1, XLA_FLAGS=FAST_COMPILATION):
        wrong = {key: text for key, text in found.items() if key.endswith("a wrong name")}
        assert {key: text for key, text in wrong.items() if not re.match("refused: offload: .*'batch'", text)} == {}
        assert {key: text for key, text in (found.items() - wrong.items()) if text != "true"} == {}


@pytest.mark.parametrize("is_global", [False, True])
def test_what_offload_refuses_and_leaves(is_global: bool) -> None:
    coordinator = [f"127.0.0.1:{free_port()}"] if is_global else []
    assert run("offload_refusals.py", *coordinator, workers=2, reducers=1) == [[], []]
