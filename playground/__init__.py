"""A Kubernetes cluster on one machine without GPUs: for `mgpu demo`, `mgpu playground`, `mgpu simulate` and the tests.

- `cluster` puts the parts together and starts mgpu's processes; `installation` applies `manifests/`.
- `apiserver`, `kubelet`, `scheduling` and `controller_manager` behave like their Kubernetes counterparts; `realapi` runs
  a real kube-apiserver instead of the first one. `fit` has kube-scheduler's filters.
- `container_runtime`, `cri`, `nvidia_device_plugin`, `mps_control` and `simulated_nvml` stand in for a node's software.
- `demo`, `story`, `samples`, `containers` and `playground_command` are what users run; `simulate` needs no cluster.

Nothing outside imports this package at run time but the entry points in pyproject.toml; the production image does without.
"""
