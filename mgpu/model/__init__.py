"""The values that all packages share: quantities, pods, nodes, cards, GPU requests, placements and the ledger.

The values are frozen and the functions are pure: import-linter forbids clocks, loggers, clients and the environment
here. Compute is an integer in thousandths of a card ("milli"), and memory is an integer in bytes.
"""
