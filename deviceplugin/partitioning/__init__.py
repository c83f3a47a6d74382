"""Slices of this node's cards: what shall be made, what is, who has it, and what the kubelet and the Node are told.

The parts of the seed: `status` is the GPU agent, `configs` the config manager, `plugins` the device plugin; the MIG
agent and the MIG manager are `deviceplugin.mig`, the MPS server's control is `deviceplugin.isolation.mps`. `worker`
puts them together.
"""
