"""The web page of the cluster's cards: read-only, from this process's own cache, on an address of its own.

`page_app` is the HTTP side. `feed` keeps the JSON of all nodes and sends what has changed, `page_data` makes that JSON,
and `waiting_list` has the pods without cards and the reasons. `static/` is what the browser runs. docs/page.md
describes the page for users.
"""
