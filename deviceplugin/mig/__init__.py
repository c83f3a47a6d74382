"""Reads and changes the MIG mode and the MIG instances of cards through NVML.

`mode_manager` switches the MIG mode of cards, and `instance_changes` creates and destroys instances. Both call
`mig_driver`, which calls NVML.
"""
