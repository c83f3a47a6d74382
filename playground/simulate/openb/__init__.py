"""`mgpu simulate openb`: the experiment on the traces of a production cluster (docs/design/fragmentation.md)."""
