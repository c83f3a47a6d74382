"""MIG through NVML: `mode_manager` switches cards into MIG mode and out of it, `instance_changes` makes instances."""
