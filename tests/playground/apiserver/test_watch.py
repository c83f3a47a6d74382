"""List and watch: pages of one snapshot, changes in order, selectors that objects enter and leave."""

from typing import Any

import pytest

from playground.apiserver import ApiServer, User, running
from tests.playground.apiserver.api import TABLE, Api, pod


def _brief(events: list[dict[str, object]]) -> list[tuple[object, object]]:
    return [(e["type"], e["object"]["metadata"]["name"]) for e in events]  # type: ignore[index]


def test_watch_continues_where_a_list_ended(api: Api, pods: str) -> None:
    api.ok("POST", pods, pod("a"))
    rv = api.get(pods)["metadata"]["resourceVersion"]
    api.ok("POST", pods, pod("b"))
    api.patch(f"{pods}/a", {"metadata": {"labels": {"x": "1"}}})
    last = api.ok("DELETE", f"{pods}/b")
    events = api.watch(pods, rv, 4)
    assert _brief(events) == [("ADDED", "b"), ("MODIFIED", "a"), ("MODIFIED", "b"), ("DELETED", "b")]
    versions = [int(e["object"]["metadata"]["resourceVersion"]) for e in events]
    assert versions == sorted(versions)
    assert events[0]["object"]["kind"] == "Pod"
    assert events[3]["object"]["metadata"]["uid"] == last["metadata"]["uid"]


def test_watch_without_version_begins_with_existing_objects(api: Api, pods: str) -> None:
    for name in ("b", "a"):
        api.ok("POST", pods, pod(name))
    assert sorted(_brief(api.watch(pods, "", 2))) == [("ADDED", "a"), ("ADDED", "b")]


def test_watch_with_selector_shows_objects_enter_and_leave(api: Api, pods: str) -> None:
    rv = api.ok("POST", pods, pod())["metadata"]["resourceVersion"]
    for value in ("1", "2", None):
        api.patch(f"{pods}/p", {"metadata": {"labels": {"x": value}}})
    last = api.patch(f"{pods}/p", {"metadata": {"labels": {"y": "1"}}}).rv
    events = api.watch(f"{pods}?labelSelector=x", rv, 3)
    assert [e["type"] for e in events] == ["ADDED", "MODIFIED", "DELETED"]
    assert events[2]["object"]["metadata"]["labels"] == {"x": "2"}, "the last that was selected"
    assert int(events[1]["object"]["metadata"]["resourceVersion"]) < int(
        events[2]["object"]["metadata"]["resourceVersion"]
    )
    assert int(events[2]["object"]["metadata"]["resourceVersion"]) < int(last)


def test_watch_by_node_name_sees_pods_bound(api: Api, pods: str) -> None:
    made = api.ok("POST", pods, pod())
    api.ok("POST", f"{pods}/p/binding", {"metadata": {"name": "p"}, "target": {"name": "node-w"}})
    events = api.watch(f"{pods}?fieldSelector=spec.nodeName=node-w", made["metadata"]["resourceVersion"], 1)
    assert _brief(events) == [("ADDED", "p")]


def test_watch_ends_at_its_timeout(api: Api, pods: str) -> None:
    rv = api.get(pods)["metadata"]["resourceVersion"]
    assert [e for e in api.watch(f"{pods}?allowWatchBookmarks=1", rv, 99, seconds=1) if e["type"] != "BOOKMARK"] == []


def test_watch_with_send_initial_events_is_declined(api: Api, pods: str) -> None:
    if api.real:
        pytest.skip("the real server offers them")
    path = f"{pods}?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
    reply = api.call("GET", path)
    assert (reply.code, reply.reason) == (422, "Invalid")


def test_pages_of_a_list_show_one_moment(api: Api, pods: str) -> None:
    for name in "abcd":
        api.ok("POST", pods, pod(name))
    first = api.get(f"{pods}?limit=2")
    assert first["metadata"]["remainingItemCount"] == 2
    api.ok("DELETE", f"{pods}/c")
    api.ok("POST", pods, pod("e"))
    rest = api.get(f"{pods}?limit=5&continue={first['metadata']['continue']}")
    assert [i["metadata"]["name"] for i in first["items"] + rest["items"]] == ["a", "b", "c", "d"]
    assert "continue" not in rest["metadata"]
    assert first["metadata"]["resourceVersion"] == rest["metadata"]["resourceVersion"]
    assert api.call("GET", f"{pods}?continue=garbage").code == 400


def test_list_items_omit_kind_and_api_version(api: Api, pods: str) -> None:
    api.ok("POST", pods, pod())
    found = api.get(pods)
    assert (found["kind"], found["apiVersion"]) == ("PodList", "v1")
    assert not {"kind", "apiVersion"} & set(found["items"][0])


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("labelSelector=a=1", "x"),
        ("labelSelector=a!=1", "yz"),
        ("labelSelector=a", "xy"),
        ("labelSelector=!a", "z"),
        ("labelSelector=a+in+(1,2),b", "y"),
        ("labelSelector=a+notin+(1)", "yz"),
        ("fieldSelector=metadata.name=y", "y"),
        ("fieldSelector=spec.nodeName=n1,status.phase!=Failed", "z"),
        ("fieldSelector=status.phase=Pending,spec.nodeName=", "xy"),
    ],
)
def test_selectors_choose_objects(api: Api, pods: str, selector: str, names: str) -> None:
    api.ok("POST", pods, pod("x", labels={"a": "1"}))
    api.ok("POST", pods, pod("y", labels={"a": "2", "b": ""}))
    api.ok("POST", pods, pod("z", spec={"nodeName": "n1"}))
    assert "".join(i["metadata"]["name"] for i in api.get(f"{pods}?{selector}")["items"]) == names


@pytest.mark.parametrize("selector", ["fieldSelector=spec.foo=1", "fieldSelector=foo", "labelSelector=a+b+c"])
def test_malformed_selector_is_a_bad_request(api: Api, pods: str, selector: str) -> None:
    reply = api.call("GET", f"{pods}?{selector}")
    assert (reply.code, reply.reason) == (400, "BadRequest")


def test_events_are_selected_by_involved_object(api: Api, ns: str) -> None:
    events = f"/api/v1/namespaces/{ns}/events"
    for about in ("p", "q"):
        involved = {"kind": "Pod", "name": about, "namespace": ns, "uid": about}
        api.ok("POST", events, {"metadata": {"generateName": "e-"}, "involvedObject": involved, "reason": "R"})
    found = api.get(f"{events}?fieldSelector=involvedObject.name=q,involvedObject.uid=q,reason=R")["items"]
    assert [e["involvedObject"]["name"] for e in found] == ["q"]


def test_tables_have_the_columns_of_kubectl(api: Api, pods: str) -> None:
    made = api.ok("POST", pods, pod())
    table = api.call("GET", pods, Accept=TABLE).body
    columns = [(c["name"], c["priority"]) for c in table["columnDefinitions"]]
    assert columns == [
        ("Name", 0), ("Ready", 0), ("Status", 0), ("Restarts", 0), ("Age", 0),
        ("IP", 1), ("Node", 1), ("Nominated Node", 1), ("Readiness Gates", 1),
    ]  # fmt: skip
    cells = table["rows"][0]["cells"]
    assert cells[:4] + cells[5:] == ["p", "0/1", "Pending", "0", "<none>", "<none>", "<none>", "<none>"]
    assert table["rows"][0]["object"]["metadata"]["uid"] == made["metadata"]["uid"]
    events = api.watch(pods, str(int(made["metadata"]["resourceVersion"]) - 1), 1, Accept=TABLE)
    assert events[0]["object"]["kind"] == "Table"
    assert events[0]["object"]["rows"][0]["cells"][0] == "p"


def _own_server(**settings: Any) -> ApiServer:
    return ApiServer(tokens={"admin-token": User("kubernetes-admin", ("system:masters",))}, **settings)


def test_page_or_watch_older_than_the_history_is_expired(tmp_path: object) -> None:
    with running(_own_server(history=3)) as url:
        api = Api(url, "", "admin-token", tmp_path, real=False)  # type: ignore[arg-type]
        pods = "/api/v1/namespaces/default/pods"
        for name in "abc":
            rv = api.ok("POST", pods, pod(name))["metadata"]["resourceVersion"]
        page = api.get(f"{pods}?limit=1")["metadata"]["continue"]
        for value in "1234":
            api.patch(f"{pods}/a", {"metadata": {"labels": {"x": value}}})
        assert api.watch(pods, "1", 1)[0]["object"]["code"] == 410, "from an earlier life of the server"
        late = api.call("GET", f"{pods}?limit=1&continue={page}")
        assert (late.code, late.reason) == (410, "Expired")
        assert api.watch(pods, rv, 1)[0]["object"]["reason"] == "Expired"
        newest = str(int(api.get(pods)["metadata"]["resourceVersion"]) - 1)
        assert _brief(api.watch(pods, newest, 1)) == [("MODIFIED", "a")]
        api.close()


def test_bookmarks_carry_the_latest_resource_version(tmp_path: object) -> None:
    with running(_own_server(bookmark_every=0.05)) as url:
        api = Api(url, "", "admin-token", tmp_path, real=False)  # type: ignore[arg-type]
        api.ok("POST", "/api/v1/namespaces/default/configmaps", {"metadata": {"name": "m"}})
        rv = api.get("/api/v1/nodes")["metadata"]["resourceVersion"]
        bookmark = api.watch("/api/v1/pods?allowWatchBookmarks=true", "100", 1)[0]
        assert (bookmark["type"], bookmark["object"]["metadata"]["resourceVersion"]) == ("BOOKMARK", rv)
        assert bookmark["object"]["kind"] == "Pod"
        api.close()
