"""The agent as a kubelet plugin of Dynamic Resource Allocation: it publishes cards and delivers them to ResourceClaims.

`claim_driver` connects the parts. `slice_publisher` writes the ResourceSlice of the node, from which kube-scheduler
allocates claims. `claim_service` and `claim_registration` serve the kubelet. `claim_preparation` decides whether a
claim may have its cards now, and `prepared_claims` stores what was delivered, so that pods without claims cannot get
the same cards. docs/design/dra.md describes the behavior of Kubernetes that the code depends on.
"""
