"""Pure values: quantities, pods, nodes, cards, asks, placements, and the ledger that adds them up.

Units everywhere: compute in thousandths of a card ("milli"), memory in bytes, both integers.
No clock, no logger, no client, no environment.
"""
