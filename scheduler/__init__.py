"""The scheduler process: which cards, decided in the binding; and the extender that helps to choose the node."""
