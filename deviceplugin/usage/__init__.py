"""Measures what containers really use of the node's cards (docs/usage.md).

NVML says which process uses how much of a card (`nvml_usage`), and the kernel says in which container the process runs
(`process_owners`, `cgroup_names`). `container_use` brings both together with the shares that containers hold and with
what the isolation back ends measure. `usage_reader` does this once in a while on a thread; `usage_metrics` serves the
result, and `over_share` finds the containers that use more than their share.
"""
