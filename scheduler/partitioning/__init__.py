"""Controller that partitions cards by MIG and MPS for pods that wait for slices (docs/design/slices.md).

The plans are computed by the pure functions of `scheduler.engine.partitioning`; this package decides when, and writes
them. `scheduler.runtime` is its only caller.
"""
