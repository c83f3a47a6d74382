"""MPS on this node: one control daemon for each shared card, and the limits of the containers that are its clients.

`clients` decides which cards need a daemon, `daemons` starts, watches and ends them, each through a `control`;
`folders` bounds and empties the folders that containers can write, and `limits` works out a container's limits.
docs/mps.md says what the limits are good for.
"""
