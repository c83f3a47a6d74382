"""MPS on this node: a control daemon per shared card, and the limits of the containers that are its clients."""
