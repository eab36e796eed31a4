"""Benchmarks that simulate: the record of the lab, pipelines, and what grows with the number of hosts."""
