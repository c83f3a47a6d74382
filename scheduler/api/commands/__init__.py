"""Answers `mgpu inspect`, `mgpu top` and `mgpu explain` from the cache of this process.

`commands_app` has the endpoints, `readers` checks who may read them, and `live_overview` makes the view of the cluster.
The commands reach the endpoints through the API server's proxy for Services (`mgpu.cli.scheduler_source`).
docs/security.md describes the rights that this needs.
"""
