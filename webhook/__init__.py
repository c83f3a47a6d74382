"""The admission webhook: is the ask valid? Mutates and validates pods."""
