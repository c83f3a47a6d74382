"""The command `mgpu doctor`.

`collection` reads an Installation, the check modules return Findings, and `command` prints them. The functions of the
check modules are pure. To add a check, write a function that takes an Installation and returns Findings, and call it in
`command.diagnose`.
"""
