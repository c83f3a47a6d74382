"""A one-machine cluster to see mgpu work: API server, scheduling loop, kubelets, runtime and GPUs."""
