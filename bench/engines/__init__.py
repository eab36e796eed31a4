"""What is measured side by side: jaxhetero, gloo, MPICH, and the traffic alone."""
