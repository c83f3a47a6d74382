"""Evaluates one request on thousands of nodes at once, with arrays of nodes and cards instead of a loop."""
