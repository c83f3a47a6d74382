"""Presents cards, holdings, requests and reasons to people, as pictures, tables and JSON.

Nothing here reads the API server or the clock.
"""
