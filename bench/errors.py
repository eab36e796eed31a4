class BenchError(Exception):
    """The benchmark cannot be run as asked, or a process of it failed."""
