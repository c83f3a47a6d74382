"""Partitions the cards of this node into MIG instances or MPS shares, and serves these slices.

The agent creates a `service.PartitionService`, which composes the parts. `partition_worker` runs them:
`mig_partitioner` and `mps_partitioner` change the cards as `desired_slices` computes, `slice_plugins` offers the slices
to the kubelet, `node_status` reports them in the Node's annotations, and `node_partitions` shares the observed state
with the rest of the agent. The protocol with the scheduler is docs/design/slices.md.
"""
