"""The controller for MtgpuPods. It manages their cards, the occupy pods that hold these cards, and their Pods.

`node_plan` computes plans without side effects, like the modules that it imports. `mtgpupod_controller` carries plans
out; `scheduler.runtime` creates it. `mgpu simulate` uses the plans too. docs/design/mtgpu.md describes the design.
"""
