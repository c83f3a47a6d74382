"""Partition plans: which slices to create on the cards of one node, under MIG or MPS. Pure functions."""
