"""The collectives under jax.shard_map, where the mesh axis is made of the workers."""

import pytest

from tests.support.cluster import ROOT, free_port, run


@pytest.mark.parametrize(
    ("kind", "reducers", "settings"),
    [("global", 2, {}), ("global", 0, {"SETTINGS_FROM_JAX": "1"}), ("own", 2, {})],
    ids=["global mesh", "global mesh, settings from jax.distributed", "a mesh in each process"],
)
def test_collectives_over_the_workers_axis(kind: str, reducers: int, settings: dict[str, str]) -> None:
    expected = {
        "psum": [[3.0, 6.0, 9.0]],
        "psum of a constant": [3.0, 3.0],
        "psum of what does not vary": [3, 3],
        "number of workers": [0.0, 0.0, 0.0],
        "pmean": [[1.0, 2.0, 3.0]],
        "broadcast": [[1.0, 2.0, 3.0]],
    }
    coordinator = f"127.0.0.1:{free_port()}"
    for result in run("meshes.py", kind, coordinator, workers=3, reducers=reducers, **settings):
        assert result == {"True": expected, "False": expected}


@pytest.mark.parametrize("kind", ["global", "own"])
def test_workers_of_several_devices(kind: str) -> None:
    """Equal to jax.lax on whole numbers, and each gradient byte leaves a worker once, not once for each device."""
    coordinator = f"127.0.0.1:{free_port()}"
    for result in run("devices.py", kind, coordinator, workers=3, reducers=2):
        assert result["wrong"] == []
        assert 1.0 <= result["sent"] < 1.05


def test_axes_whose_sizes_and_names_mislead() -> None:
    """Axes of one device, nested shard_map, names of vmap: equal to jax.lax to the bit, or refused."""
    for result in run("axes.py", f"127.0.0.1:{free_port()}", workers=2, reducers=1):
        assert result["wrong"] == []
        assert result["count"] > 50


@pytest.mark.parametrize("kind", ["global", "own"])
@pytest.mark.parametrize("devices", [1, 2])
def test_gradients_are_never_summed_twice(kind: str, devices: int) -> None:
    """Those that JAX has summed already, because types say that parameters are replicated, are refused."""
    coordinator = f"127.0.0.1:{free_port()}"
    assert run("summed_gradients.py", kind, str(devices), coordinator, workers=3, reducers=1) == [[]] * 3


@pytest.mark.parametrize(("workers", "devices"), [(2, 2), (3, 4)])
def test_one_axis_of_all_devices_of_all_workers(workers: int, devices: int) -> None:
    """As `jax.make_mesh((jax.device_count(),), ("devices",))` makes it: right results, and each byte is sent once."""
    for result in run("flat_axis.py", f"127.0.0.1:{free_port()}", str(devices), workers=workers, reducers=2):
        assert result["wrong"] == []
        assert 1.0 <= result["sent"] < 1.05


@pytest.mark.parametrize("devices", [1, 2])
def test_global_arrays_in_plain_jit(devices: int) -> None:
    """Gradients of type "unreduced", and the smallest edit for automatic sharding: XLA's parameters, by our sums."""
    assert run("global_arrays.py", f"127.0.0.1:{free_port()}", str(devices), workers=2, reducers=2) == [[], []]


def test_the_cases_of_the_tests_of_jax() -> None:
    """All hold, but for those that docs/parity_cases.md names, which are refused."""
    document = (ROOT / "docs" / "parity_cases.md").read_text()
    for result in run("jax_cases.py", f"127.0.0.1:{free_port()}", workers=2, reducers=1):
        assert result["failed"] == []
        assert [name for name in result["refused"] if f"`{name}`" not in document] == []


def test_a_train_step_with_our_pmean_ends_where_that_of_lax_ends() -> None:
    """Plain jit, a global mesh and a mesh per process, with and without types: the same parameters to the bit."""
    digests: set[str] = set()
    for arguments, count in (([f"127.0.0.1:{free_port()}"], 5), ([], 3)):
        for result in run("same_step.py", *arguments, workers=2, reducers=1):
            assert len(result) == count
            digests.update(result.values())
    assert len(digests) == 1
