"""`mgpu doctor`: `collection` reads an Installation, the check modules return Findings, `command` prints them.

The check modules are pure. A new check is a function from an Installation to Findings that `command.diagnose` calls.
"""
