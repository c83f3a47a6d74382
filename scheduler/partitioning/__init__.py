"""Partitioning of cards by MIG and MPS: which node is partitioned how, and when (docs/design/slices.md).

The plans themselves are pure (scheduler/engine/partitioning); here is the controller that makes and writes them.
"""
