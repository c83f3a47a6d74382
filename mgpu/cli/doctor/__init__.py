"""`mgpu doctor`: what is seen of an installation (`seen`, read by `looking`), and what the checks make of it."""
