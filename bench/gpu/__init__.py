"""What a GPU's arrays cost: `python -m bench.gpu`, on a machine with one."""
