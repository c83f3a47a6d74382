"""Presents cards, holdings, requests and reasons to people, as pictures, tables and JSON.

The commands, the scheduler's web page and metrics, `mgpu simulate` and `mgpu demo` use it. Nothing here reads the API
server or the clock.
"""
