"""Limits containers by HAMi-core, a library in the container that intercepts calls of CUDA (docs/isolation.md).

mgpu does not contain the library; the administrator provides it on the node. The rest of the agent calls only
`backend`. `edits` computes what a container gets, `folders` creates the folder of each container, and `shared_region`
reads and changes the file in which the library keeps limits and use.
"""
