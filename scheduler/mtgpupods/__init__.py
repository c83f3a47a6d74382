"""The controller for MtgpuPods. It manages their cards, the occupy pods that hold these cards, and their Pods.

`node_plan` and the modules that it imports compute plans without side effects. `mtgpupod_controller` carries the plans
out. docs/design/mtgpu.md describes the design.
"""
