"""The node agent: a device plugin that gives each container exactly the cards of its allocation record."""
