"""The job that this process takes part in: its world, and what everything else stands on. Imports no JAX."""
