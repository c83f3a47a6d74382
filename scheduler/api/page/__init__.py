"""The web page of the cluster's cards: read-only, of what this process knows anyway, on an address of its own."""
