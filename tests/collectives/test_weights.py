"""What `pmean(..., weight=)` makes of weights of any dtype and size: the mean, or NaN, and never another number."""

from __future__ import annotations

import pytest

from tests.support.cluster import run


@pytest.fixture(scope="module")
def means() -> dict[str, list[float]]:
    first, second = run("weights.py", workers=2, reducers=1)
    assert first == second
    return dict(first)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "float16", "bool"])
def test_devices_add_their_weights_up_without_a_limit(means: dict[str, list[float]], dtype: str) -> None:
    """Of two workers, each with two devices that have 0, 1, 2, 3 and 4, 5, 6, 7."""
    assert means[dtype] == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16"])
def test_equal_leaves_have_themselves_as_their_mean(means: dict[str, list[float]], wire_dtype: str) -> None:
    """Also where the weights are rounded."""
    assert means[f"equal {wire_dtype}"] == [0.75] * 4


@pytest.mark.parametrize("what", ["too large for float16", "zero"])
def test_without_a_mean_there_is_no_number(means: dict[str, list[float]], what: str) -> None:
    assert means[what] == ["nan"] * 4
