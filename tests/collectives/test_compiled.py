"""What XLA makes of a collective."""

from pathlib import Path

from tests.support.cluster import THROUGH_LANES, Cluster, run


def test_one_custom_call_per_bucket_and_no_copy_of_it() -> None:
    """Three weights of 64 to 256 KiB in two buckets are two calls, which read and write the leaves where they are."""
    for result in run("hlo.py", workers=2, reducers=1):
        assert result["calls"] == ["jaxhetero_all_reduce"] * 2
        assert not [size for size in result["moved"] if size >= min(result["sizes"])]
        assert result["moved_of_argument"] == []
        # What goes in 16 bits is converted on its way, but on a GPU before it leaves that.
        assert bool(result["moved_in_half"]) == THROUGH_LANES
        assert result["operand_on_gpu"] == ["256x256xbf16"]
        # From these a call knows how large its chunks may be: of all buckets together, also where a hook makes each.
        assert result["call_bytes"] == [4 * sum(result["sizes"])] * 2
        assert result["replicated_call_bytes"] == [2 * sum(result["sizes"])] * 2
        # What a profile shows of each: who calls it, its bucket and its bytes.
        for scope, size in zip(sorted(result["scopes"]), ("294912 bytes", "65536 bytes"), strict=True):
            assert "psum at hlo.py:step bucket" in scope
            assert size in scope
            assert scope.endswith(f"/jaxhetero_psum_{size.replace(' ', '_')}")


def test_one_custom_call_per_bucket_of_rows() -> None:
    """The weights, in two buckets, are gathered and scattered again, row by row where they are."""
    for result in run("hlo.py", workers=2, reducers=1):
        names = [f"jaxhetero_all_gather_{size}_bytes" for size in (65536, 294912)]
        names += [f"jaxhetero_psum_scatter_{size}_bytes" for size in (131072, 589824)]
        assert sorted(result["calls_of_rows"]) == sorted(names)
        assert result["calls_of_rows_on_gpu"] == 4
        assert result["moved_of_rows"] == []


def test_a_program_outlives_its_world_and_its_process(tmp_path: Path) -> None:
    """Compiled once for all worlds of one shape; retraced, or loaded from disk, it finds its ops and its world.

    Its ops are the same on every rank, in every world, and however often it is traced.
    """
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    ops = []
    for attempt in range(2):
        for result in run("recompile.py", workers=2, reducers=0, **cache):
            first, second, retraced = result["runs"]
            assert [outcome["result"] for outcome in result["runs"]] == [6.0] * 3
            assert first["traced"] == 1
            assert second["compiled"] == 0
            assert attempt == 0 or result["hits"] > 0
            assert len(first["calls"]) == 2
            ops += [(outcome["calls"], outcome["rounds"]) for outcome in (first, second, retraced)]
    assert ops == ops[:1] * 12
    assert [round_ for _, round_ in ops[0][1]] == [0, 1, 2] * 2


def test_a_profile_names_the_collective_and_its_bytes() -> None:
    """In a trace of a real step, in which ``jax.debug.print`` prints what was summed."""
    with Cluster(2) as cluster:
        cluster.start_workers("profiled.py")
        for outcome in cluster.wait_workers():
            assert any(name.startswith("jaxhetero_psum_4000_bytes") for name in outcome.result)
            assert outcome.output.count("the sum begins with 2.0") == 2
