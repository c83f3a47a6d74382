"""`mgpu simulate openb`: replays the trace of a production cluster (docs/design/fragmentation.md)."""
