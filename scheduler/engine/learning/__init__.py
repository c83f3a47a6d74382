"""Placing so that what stays free stays usable, learnt from the pods seen: pure, over numpy arrays of nodes × cards."""
