"""Serves HTTP for the three processes: admission reviews, gunicorn with TLS, certificates, metrics and logs.

Nothing here knows what a webhook decides. Clients of the API server are passed in; nothing here creates one.
"""
