"""Slices of cards: which node is cut how, and when (slices.md)."""
