"""What the policies `fragmentation` and `fgd` learn from the pods that arrive, over numpy arrays of nodes and cards."""
