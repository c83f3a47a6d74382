"""`mgpu simulate right-sizing`: what would fit if shares were as large as what pods have really used.

`recorded_use` reads what Prometheus has recorded, `workloads` sums it up for each workload and computes the share that
the workload needs, `repacking` places the pods again with these shares, and `right_sizing_command` prints the report.
It is a report: nothing of mgpu changes shares by itself. docs/right-sizing.md describes it for users.
"""
