"""Serves HTTP for the three processes: admission reviews, gunicorn with TLS, certificates, metrics and logs.

Nothing here knows what a webhook decides, and nothing here creates a client of the API server.
"""
