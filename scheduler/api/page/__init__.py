"""The web page of the cluster's cards: read-only, served from the cache of this process at its own address.

`page_app` is the HTTP side, and `scheduler.api.app` adds it to the process. `feed` keeps the JSON of all nodes and
sends changes, `page_data` renders that JSON, and `waiting_list` has the pods without cards and the reasons. `static/`
runs in the browser. docs/page.md describes the page for users.
"""
