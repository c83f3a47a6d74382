"""A Kubernetes cluster on one machine without GPUs: for `mgpu demo`, `mgpu playground`, `mgpu simulate` and the tests.

- `cluster` starts these parts and mgpu's processes; `installation` applies `manifests/`.
- `apiserver`, `kubelet`, `scheduling` and `controller_manager` behave like their Kubernetes counterparts; `realapi`
  runs a real kube-apiserver instead of the first one. `fit` has kube-scheduler's filters.
- `container_runtime`, `cri`, `nvidia_device_plugin`, `mps_control` and `simulated_nvml` replace the software of a node.
- `demo`, `story`, `samples`, `containers` and `playground_command` are what users run; `simulate` needs no cluster.

At run time only the entry points in pyproject.toml lead here; the production image does not contain this package.
"""
