"""An emulated accelerator: it computes for as long as a real one would, and its gradients are real arrays."""
