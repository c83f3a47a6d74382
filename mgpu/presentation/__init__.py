"""Presents cards, holdings, requests and reasons to people, as pictures, tables and JSON.

Mainly the commands and the scheduler's web page use it. Nothing here reads the API server or the clock.
"""
