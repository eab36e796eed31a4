"""Equipment of tests and benchmarks: networks, clocks, drivers and clusters that are not here."""
