"""A Kubernetes cluster on one machine without GPUs: for `mgpu demo`, `mgpu playground`, `mgpu simulate` and the tests.

- `cluster` starts all other parts and mgpu's processes; `installation` applies `manifests/`.
- `apiserver`, `kubelet`, `scheduling` and `controller_manager` behave like their Kubernetes counterparts. `realapi`
  runs a real kube-apiserver in place of `apiserver`. `fit` decides like kube-scheduler's filter plugins.
- `container_runtime`, `cri`, `nvidia_device_plugin`, `mps_control` and `simulated_nvml` replace the software of a node.
- `demo`, `story`, `samples`, `containers` and `playground_command` implement the commands that need a cluster.
  `simulate` needs none.

mgpu finds this package only through entry points in pyproject.toml, because the production image does not contain it.
"""
