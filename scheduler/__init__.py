"""The scheduler process. It decides the cards of a pod in its binding, and its extender helps to choose the node."""
