"""The controller that partitions cards by MIG and MPS for pods that wait for slices (docs/design/slices.md).

The pure functions of `scheduler.engine.partitioning` compute the plans. This package decides when a plan is made, and
writes it. The extender and the late binding decisions report waiting pods to the controller.
"""
