"""Seals: what makes a placement record one that mgpu decided, and not merely annotations of its names."""

SEAL = "mgpu.io/seal"
"""The annotation that authenticates the placement annotations of its pod."""
