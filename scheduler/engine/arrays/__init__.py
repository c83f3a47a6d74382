"""One pod held against thousands of nodes at once: arrays of nodes × cards instead of a loop. Pure."""
