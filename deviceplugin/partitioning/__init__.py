"""Cutting this node's cards into MIG instances or MPS shares, and serving these slices.

`service` composes the parts, `partition_worker` runs them. `mig_partitioner` and `mps_partitioner` change the cards as
`desired_slices` works out; `slice_plugins` offers the slices to the kubelet; `node_status` reports them in the Node's
annotations; `node_partitions` shows the rest of the agent what exists. docs/design/slices.md has the protocol.
"""
