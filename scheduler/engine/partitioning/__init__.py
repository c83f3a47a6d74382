"""Pure functions that compute partition plans: which slices to create on the cards of one node, under MIG or MPS."""
