"""The admission webhook, which completes and validates pods that request GPUs, and validates MtgpuPods."""
