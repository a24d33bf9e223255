"""A simulated MPS host, driven by one number: see docs/simulation.md."""
