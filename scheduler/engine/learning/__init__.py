"""Computes what the policies `fragmentation` and `fgd` learn from the pods that arrive, with numpy arrays."""
