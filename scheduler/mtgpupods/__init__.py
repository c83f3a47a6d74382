"""Controller for MtgpuPods: their cards, the occupy pods that hold these cards, and their Pods.

`node_plan` computes plans and is pure, like the modules that it imports. `mtgpupod_controller` carries plans out.
The design is docs/design/mtgpu.md.
"""
