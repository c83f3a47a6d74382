"""The admission webhook, which validates and mutates pods that request GPUs, and MtgpuPods."""
