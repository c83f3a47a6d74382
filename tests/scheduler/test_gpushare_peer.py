"""What the peer gets wrong, one test per case of gpushare.md's list, each seen there by running it; here it holds.

What happens on the node is in tests/deviceplugin/test_gpushare_peer.py.
"""

import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from werkzeug.test import Client

from mgpu.dialects import gpushare
from mgpu.kube.reflector import Reflector
from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from tests import builders as b
from tests.scheduler.fake import Replica, admitted, clients, cluster
from tests.scheduler.gpushare import allocated, asking, container

PATH = "/gpushare-scheduler"


@pytest.fixture
def replica() -> Replica:
    """`n1` with one card of 80 GiB, behind the binding webhook."""
    made = Replica(cluster(("n1", 1)))
    made.api.admit = admitted(made)
    return made


@pytest.fixture
def client(replica: Replica) -> Client:
    return clients(replica)[1]


def post(client: Client, verb: str, **body: Any) -> Any:
    reply = client.post(f"{PATH}/{verb}", json=body)
    assert reply.status_code == 200, reply.text
    return orjson.loads(reply.data)


def fits(client: Client, units: object, node: str = "n1") -> bool:
    passed = post(client, "filter", Pod=asking("probe", units), NodeNames=[node])["NodeNames"]
    return bool(passed == [node])


def bind(client: Client, name: str, node: str = "n1") -> str:
    answer = post(client, "bind", PodName=name, PodNamespace="default", PodUID=f"uid-{name}", Node=node)
    return str(answer["Error"])


def put(replica: Replica, raw: dict[str, Any]) -> None:
    replica.api.put("pods", raw)
    replica.deliver()


def resize(replica: Replica, gib: int, count: int = 1) -> None:
    replica.api.put("devices", write_device(Node("n1"), "", b.cards(count, gib)))
    replica.deliver()


def used(client: Client, node: str = "n1") -> list[int]:
    """What `/inspect` says of each card."""
    (row,) = orjson.loads(client.get(f"{PATH}/inspect/{node}").data)["nodes"]
    return [device["usedGPU"] for device in row["devs"]]


def test_a_terminating_pods_card_is_not_given_away_while_it_still_runs(replica: Replica, client: Client) -> None:
    raw = allocated("p", 60, "n1", 0)
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    put(replica, raw)
    assert not fits(client, 30)
    replica.api.remove("pods", "p")
    replica.deliver()
    assert fits(client, 80)


def test_more_used_than_there_is_leaves_nothing_and_not_everything(replica: Replica, client: Client) -> None:
    put(replica, allocated("p", 60, "n1", 0))
    resize(replica, 40)
    assert not fits(client, 1)
    put(replica, asking("q", 1))
    assert "no cards" in bind(client, "q")
    assert used(client) == [60]


def test_two_replicas_do_not_book_one_card_twice(replica: Replica, client: Client) -> None:
    other = Replica(replica.api)

    other.leading = False
    for name in "pq":
        put(replica, asking(name, 50))
    other.deliver()
    assert bind(client, "p") == ""
    assert "no cards" in bind(clients(other)[1], "q")  # it has not seen the other one's decision
    assert "nodeName" not in replica.api.pod("q")["spec"]


def test_two_replicas_the_next_leader_knows_what_the_last_one_gave(replica: Replica, client: Client) -> None:
    put(replica, asking("p", 50))
    assert bind(client, "p") == ""
    put(replica, asking("q", 50))
    assert "no cards" in bind(clients(Replica(replica.api))[1], "q")


def test_a_retried_bind_neither_picks_again_nor_counts_twice() -> None:
    replica = Replica(cluster(("n1", 2)))
    client = clients(replica)[1]
    put(replica, asking("p", 50))
    assert bind(client, "p") == ""
    assert "refused" in bind(client, "p")  # bound already; its event has not come yet
    assert used(client) == [50, 0]
    replica.deliver()
    assert replica.api.annotations("p")[gpushare.INDEX] == "0"
    assert used(client) == [50, 0]


def test_a_capacity_change_counts_at_once(replica: Replica, client: Client) -> None:
    assert not fits(client, 100)
    resize(replica, 141)
    assert fits(client, 100)
    resize(replica, 141, count=2)
    assert used(client) == [0, 0]


def test_a_capacity_change_of_a_node_without_device_counts_too() -> None:
    replica = Replica(cluster())
    for units, fit in (("16", False), ("32", True)):
        raw = b.node("n1")
        raw["status"]["capacity"] |= {gpushare.MEMORY: units, gpushare.COUNT: "1"}
        replica.api.put("nodes", raw)
        replica.deliver()
        assert fits(clients(replica)[1], 20) is fit


def test_gpu_count_seen_before_gpu_mem_leaves_no_cards_of_size_0() -> None:
    replica = Replica(cluster())
    client = clients(replica)[1]
    raw = b.node("n1")
    raw["status"]["capacity"] |= {gpushare.COUNT: "2"}
    replica.api.put("nodes", raw)
    replica.deliver()
    assert orjson.loads(client.get(f"{PATH}/inspect").data) == {"nodes": []}
    raw["status"]["capacity"] |= {gpushare.MEMORY: "32"}
    replica.api.put("nodes", raw)
    replica.deliver()
    (node,) = orjson.loads(client.get(f"{PATH}/inspect").data)["nodes"]
    assert [device["totalGPU"] for device in node["devs"]] == [16, 16]
    assert fits(client, 16)


def test_the_same_name_with_a_new_uid_does_not_leak_the_old_ones_share(replica: Replica, client: Client) -> None:
    put(replica, allocated("p", 60, "n1", 0, uid="first"))
    replica.api.remove("pods", "p")
    replica.api.put("pods", allocated("p", 10, "n1", 0, uid="second"))
    replica.deliver()
    assert used(client) == [10]
    assert fits(client, 70)


def test_the_same_name_with_a_new_uid_in_whatever_order_the_events_come(replica: Replica, client: Client) -> None:
    """A re-list tells of what is new before what is gone."""
    old = allocated("p", 60, "n1", 0, uid="first")
    put(replica, old)
    replica.state.pod_changed(allocated("p", 10, "n1", 0, uid="second"))
    replica.state.pod_gone(old)
    assert used(client) == [10]


class Lists:
    """An API server whose watches never bring anything: only what is listed is known."""

    def __init__(self, replica: Replica) -> None:
        self._replica, self.lists = replica, 0

    def pages(self, _: str) -> Iterator[tuple[list[dict[str, Any]], str]]:
        self.lists += 1
        yield list(self._replica.api.pods.values()), str(self.lists)

    def watch(self, *_: str) -> "Lists":
        return self

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return iter(())

    def close(self) -> None:
        """Nothing is open."""

    end = close


def test_a_pod_bound_and_deleted_while_the_watch_was_down_does_not_leak(replica: Replica, client: Client) -> None:
    lists: Any = Lists(replica)
    watch = Reflector(lists, "/api/v1/pods", replica.state.pod_changed, replica.state.pod_gone)
    replica.api.put("pods", asking("p", 60))
    watch.start()
    try:
        assert watch.wait_synced(20)
        assert bind(client, "p") == ""  # nobody hears of it
        assert used(client) == [60]
        replica.api.remove("pods", "p")
        assert watch.refresh(20)
    finally:
        watch.stop()
    assert used(client) == [0]
    assert fits(client, 80)


def test_a_pod_on_a_missing_node_does_not_stop_the_start() -> None:
    api = cluster(("n1", 1))
    api.put("pods", allocated("lost", 60, "gone", 0))
    api.put("pods", allocated("p", 20, "n1", 0))
    replica = Replica(api)
    client = clients(replica)[1]
    assert used(client) == [20]
    assert fits(client, 60)
    api.put("nodes", b.node("gone"))
    api.put("devices", write_device(Node("gone"), "", b.cards(1, node="gone")))
    replica.deliver()
    assert used(client, "gone") == [60]


def unhealthy(replica: Replica, gpus: object, node: str = "n1") -> None:
    meta = {"namespace": "kube-system", "name": f"unhealthy-gpu-{node}"}
    replica.api.put("configmaps", {"metadata": meta, "data": {"gpus": gpus}})
    replica.deliver()


@pytest.mark.parametrize("gpus", ["x", "0,x", ",", "1.5", "-1", "0;1", 3, "٣"])
def test_a_malformed_unhealthy_list_marks_nothing_and_is_told(replica: Replica, client: Client, gpus: object) -> None:
    unhealthy(replica, gpus)
    assert fits(client, 80)
    ((name, reason, message),) = replica.events
    assert (name, reason) == ("n1", "BadUnhealthyList")
    assert "unhealthy-gpu-n1 marks no card: data.gpus" in message


def test_concurrent_requests_during_a_burst_of_deletes_are_all_answered() -> None:
    replica = Replica(cluster(("n1", 8), ("n2", 8)))
    names = [f"p{i}" for i in range(200)]
    for i, name in enumerate(names):
        replica.api.put("pods", allocated(name, 3, f"n{i % 2 + 1}", i % 8))
    replica.deliver()
    failed: list[object] = []
    answered, over = [0] * 4, threading.Event()

    def request(me: int) -> None:
        client = clients(replica)[1]
        try:
            while not over.is_set() or answered[me] < 3:
                post(client, "filter", Pod=asking("probe", 60), NodeNames=["n1", "n2"])
                post(client, "prioritize", Pod=asking("probe", 60), NodeNames=["n1", "n2"])
                assert client.get(f"{PATH}/inspect").status_code == 200
                answered[me] += 1
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=request, args=(i,)) for i in range(len(answered))]
    for thread in threads:
        thread.start()
    for name in names:
        replica.api.remove("pods", name)
        replica.deliver("pods")
    over.set()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert min(answered) >= 3
    client = clients(replica)[1]
    assert used(client) == used(client, "n2") == [0] * 8


def test_inspect_of_an_unknown_node_is_answered(client: Client) -> None:
    reply = client.get(f"{PATH}/inspect/n9")
    assert reply.status_code == 404
    assert orjson.loads(reply.data) == {"error": "there is no node n9"}


def test_a_slow_api_server_does_not_stop_filtering(replica: Replica, client: Client) -> None:
    put(replica, asking("p", 60))
    inside, go_on = threading.Event(), threading.Event()
    create = replica.api.create

    def slowly(path: str, body: dict[str, Any]) -> dict[str, Any]:
        inside.set()
        assert go_on.wait(60)
        return create(path, body)

    replica.api.create = slowly  # type: ignore[method-assign]
    answers: list[str] = []
    binding = threading.Thread(target=lambda: answers.append(bind(clients(replica)[1], "p")))
    binding.start()
    try:
        assert inside.wait(60)
        assert fits(client, 20)  # answered while the binding is on its way,
        assert not fits(client, 30)  # and counts what it will take
        assert used(client) == [60]
    finally:
        go_on.set()
        binding.join(60)
    assert answers == [""]


def test_a_failed_bind_leaves_nothing_on_the_pod_and_holds_nothing(replica: Replica, client: Client) -> None:
    put(replica, asking("p", 60))
    replica.api.refuse_bindings = True
    assert "refused" in bind(client, "p")
    assert replica.api.annotations("p") == {}
    assert fits(client, 80)
    replica.api.refuse_bindings = False
    assert bind(client, "p") == ""


@pytest.mark.parametrize("key", [gpushare.INDEX, gpushare.OF_POD, gpushare.OF_CARD, gpushare.ALLOCATION])
@pytest.mark.parametrize("value", ["", "x", "-1", "1e1", "0x1", "99999999999999999999"])
def test_an_unparsable_annotation_does_not_count_as_0(replica: Replica, client: Client, key: str, value: str) -> None:
    raw = allocated("p", 60, "n1", 0, phase="Running")
    raw["metadata"]["annotations"][key] = value
    put(replica, raw)
    assert not fits(client, 30)
    assert fits(client, 20)
    assert ("p", "UnknownCards") in [event[:2] for event in replica.events]


def test_an_unparsable_annotation_holds_every_card_it_may_mean() -> None:
    replica = Replica(cluster(("n1", 3)))
    raw = allocated("p", 60, "n1", "x", phase="Running")
    put(replica, raw)
    assert not fits(clients(replica)[1], 30)


def test_init_containers_are_counted(replica: Replica, client: Client) -> None:
    raw = b.pod("p", container("c", 10), init=(container("i", 60),))
    assert not post(client, "filter", Pod=asking("x", 81), NodeNames=["n1"])["NodeNames"]
    put(replica, raw)
    assert bind(client, "p") == ""
    replica.deliver()
    assert used(client) == [60]
    assert not fits(client, 30)
    assert fits(client, 20)


def test_init_containers_that_go_on_beside_the_others_are_added(replica: Replica, client: Client) -> None:
    raw = b.pod("p", container("c", 50), init=({**container("i", 40), "restartPolicy": "Always"},))
    put(replica, raw)
    assert "no cards" in bind(client, "p")
    assert replica.state.holdings() == ()
