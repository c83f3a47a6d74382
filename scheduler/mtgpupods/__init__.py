"""MtgpuPods: which card each gets, the pods that keep it and the Pods that run on it (mtgpu.md)."""
