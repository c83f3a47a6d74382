"""The web page of the cluster's cards: read-only, served from the cache of this process at its own address.

`page_app` contains the HTTP app, and `scheduler.api.app` adds it to the process. `feed` keeps the JSON of all nodes and
sends changes, `page_data` makes that JSON, and `waiting_list` lists the pods without cards with the reasons. The files
in `static/` run in the browser. docs/page.md describes the page for users.
"""
