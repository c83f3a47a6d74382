"""Frozen values and pure functions: quantities, pods, nodes, cards, requests, placements, and the ledger.

Units everywhere: compute in thousandths of a card ("milli"), memory in bytes, both integers.
No clock, no logger, no client, no environment.
"""
