"""Limits the memory of containers by the driver itself, for each cgroup (docs/isolation.md, "driver").

The rest of the agent calls only `backend`. `memory_limits` sets and reads limits through NVML, `cgroup_paths` finds the
cgroup of a container, and `toolkit_hook` finds the hook of NVIDIA's container toolkit, which sets the limit before the
first process of a container starts.
"""
