"""`mgpu simulate openb`: the experiment on the traces of a production cluster (spec page fragmentation.md)."""
