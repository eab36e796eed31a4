"""What XLA makes of a collective."""

from cluster import run


def test_one_custom_call_per_bucket_and_no_copy_of_it() -> None:
    """Three weights of 64 to 256 KiB in two buckets are two calls, which read and write the leaves where they are."""
    for result in run("hlo.py", workers=2, reducers=1):
        assert result["calls"] == ["jaxhetero_all_reduce"] * 2
        assert not [size for size in result["moved"] if size >= min(result["sizes"])]
