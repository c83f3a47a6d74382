"""What the processes that answer HTTP share: the admission protocol, gunicorn, TLS certificates, logs.

Limits: nothing here knows what a webhook decides, and nothing talks to the API server; clients are passed in.
"""
