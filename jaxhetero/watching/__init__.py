"""What others see of a process while it runs: its metrics, and a trace of its rounds."""
