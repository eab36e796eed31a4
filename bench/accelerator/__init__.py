"""An emulated accelerator: its steps last as long as those of a real one, and its gradients are real arrays."""
