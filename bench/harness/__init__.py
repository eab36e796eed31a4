"""How a benchmark runs: hosts and processes, rounds in turn, figures, tables and plots."""
