"""MIG through NVML: `mig_driver` reads and changes cards, by which `mode_manager` switches their MIG mode and
`instance_changes` creates and destroys instances."""
