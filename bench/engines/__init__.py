"""The engines that the benchmarks compare: jaxhetero, gloo, MPICH, and echo, which is the traffic alone."""
