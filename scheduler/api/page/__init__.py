"""The web page of the cluster's cards: read-only, served from the cache of this process at its own address.

`page_app` is the HTTP app. `feed` keeps the JSON of all nodes and sends changes, `page_data` makes that JSON, and
`waiting_list` lists the pods without cards and the reasons why they wait. `node_use` keeps what is really used of the
cards of visible nodes, which `agent_client` reads from the agents. The files in `static/` run in the browser.
docs/page.md describes the page for users.
"""
