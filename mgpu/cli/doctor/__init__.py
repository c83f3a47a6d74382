"""`mgpu doctor`: `collection` reads an `installation`, the other modules check it, `command` prints the findings."""
