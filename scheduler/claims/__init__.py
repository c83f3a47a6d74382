"""Controllers of ResourceClaims, each on its own thread.

`waker` makes kube-scheduler retry pods whose claims fit by the ledger. `repair` replaces allocations that were written
without a decision of mgpu and do not fit. docs/dra.md describes both. `templates` creates the ResourceClaimTemplates of
pods that the webhook has converted (docs/dra-convert.md).
"""
