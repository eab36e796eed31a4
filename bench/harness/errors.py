class BenchError(Exception):
    """The benchmark cannot run with these options, or one of its processes failed."""
