"""MtgpuPods: which card each gets, the occupy pods that hold the cards, and the Pods that run on them.

`node_plan` and what it imports are pure; `mtgpupod_controller` carries plans out. Design: docs/design/mtgpu.md.
"""
