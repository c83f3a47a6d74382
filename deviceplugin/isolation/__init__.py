"""Limits containers to their shares of cards: MPS daemons, and files for isolation back ends outside of mgpu."""
