"""Presents cards, holdings, requests and reasons to people, as pictures, tables and JSON.

The commands, the web page, `mgpu simulate` and the demo use it. Nothing here reads the API server or the clock.
"""
