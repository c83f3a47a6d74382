"""What people see of cards, holdings, requests and reasons: pictures, tables and JSON.

Shared by the commands, the web page, `mgpu simulate` and the demo. Nothing here reads the API or the clock.
"""
