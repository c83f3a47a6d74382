"""Runs one MPS control daemon for each shared card of this node, and limits the containers that are its clients.

The rest of the agent calls only `clients`, which decides which cards need a daemon. `daemons` starts, watches and ends
the daemons through `control`. `folders` limits and empties the folders that containers can write to, and `limits`
computes the limits of a container. `partition_owners` gives containers their static SM partitions, where daemons have
them. docs/mps.md describes what the limits can enforce.
"""
