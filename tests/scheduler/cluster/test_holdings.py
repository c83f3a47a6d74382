"""What pods hold by their records, by what their node reports, and without either."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from mgpu.model.device_checkpoints import no_devices_entry, write_entries
from mgpu.model.device_object import WHOLE_CARDS_LABEL
from mgpu.presentation.overview import make_overview
from mgpu.settings import load_settings
from tests import builders as b
from tests.scheduler.cluster.objects import ASSUMED, CHECKPOINTS, INDEX, Raw, core_free, given_row, put, record, report
from tests.scheduler.fake import SETTINGS, FakeApi, Replica, cluster
from tests.scheduler.partitioning.cluster import MIG, slices, wants
from tests.scheduler.partitioning.cluster import cluster as partitioned_cluster

COMPLETE = json.loads(write_entries([no_devices_entry("*")]))
"""The row with which a node promises to list all pods that have cards without a record."""
BARE = json.loads(write_entries([no_devices_entry("uid-p")]))


@pytest.fixture
def api() -> FakeApi:
    return cluster(("n1", 2))


@pytest.fixture
def replica(api: FakeApi) -> Replica:
    return Replica(api)


def bound(cards: str = "0", core: int = 50, **more: Any) -> Raw:
    return b.share("p", core, annotations=record(cards), node="n1", **more)


def whole(name: str = "p", amounts: Raw | None = None, **more: Any) -> Raw:
    amounts = amounts or {"nvidia.com/gpu": "1"}
    return b.pod(name, {"name": "c", "resources": {"limits": amounts, "requests": amounts}}, node="n1", **more)


def old(**more: Any) -> Raw:
    """A pod without a GPU request, to which its node may have given cards."""
    return b.pod("old", b.container("c"), node="n1", **{"phase": "Running", **more})


def ran(raw: Raw, *containers: str, phase: str = "Pending") -> Raw:
    rows = [{"name": name, "containerID": "x", "state": {"running": {}}} for name in containers]
    return {**raw, "status": {"phase": phase, "containerStatuses": rows}}


def free(replica: Replica) -> list[int]:
    """Return what is free of each card, after checking that `mgpu inspect` shows the same."""
    overview = make_overview(
        replica.api.nodes.values(), replica.api.devices.values(), replica.api.pods.values(), SETTINGS
    )
    shown = [card.state.core_free for node in overview.nodes for card in node.cards if node.name == "n1"]
    assert core_free(replica) == shown
    return shown


class TestRecord:
    def test_bound_pod_holds_the_card_of_its_record_until_it_ends(self, replica: Replica) -> None:
        put(replica, bound("1"))
        assert core_free(replica) == [1000, 500]
        deleting = bound("1")
        deleting["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        put(replica, deleting)
        assert core_free(replica) == [1000, 500]
        for phase in ("Succeeded", "Failed"):
            put(replica, bound("1", phase=phase))
            assert core_free(replica) == [1000, 1000]

    def test_node_keeps_its_version_when_only_the_status_of_a_pod_changes(self, replica: Replica) -> None:
        """Otherwise every probe of a container would make decisions about the node start again."""
        put(replica, bound())
        before = replica.state.node_snapshot("n1", "")
        put(replica, bound(phase="Running"))
        assert replica.state.node_snapshot("n1", "") == before

    def test_init_containers_and_sidecars_count_while_they_run(self, replica: Replica) -> None:
        raw = b.pod(
            "p",
            b.container("c", 60, 1024),
            init=(b.container("i", 70, 1024), b.container("s", 20, 1024, restartPolicy="Always")),
            annotations={ASSUMED: "true", **{f"{INDEX[:-1]}{name}": "0" for name in "isc"}},
            node="n1",
        )
        put(replica, raw)
        # The sidecar and the app container run at the same time; the init container ran before both.
        assert core_free(replica) == [200, 1000]

    @pytest.mark.parametrize("text", ["minGPUMemory: 4096", "enabled: false", "MGPUEnable: false"])
    def test_running_pod_keeps_its_cards_when_settings_change(self, text: str) -> None:
        replica = Replica(cluster(("n1", 2)), settings=load_settings(f"dialects: {{mgpu: {{{text}}}}}"))
        put(replica, bound("1", phase="Running"))
        assert core_free(replica) == [1000, 500]

    @pytest.mark.parametrize(
        ("raw", "expected", "text"),
        [
            pytest.param(bound("banana", phase="Running"), [500, 500], "banana", id="unreadable record"),
            pytest.param(
                bound("7", phase="Running"), [1000, 1000], "card 7, which n1 does not have", id="no such card"
            ),
            pytest.param(b.share("p", node="n1", phase="Running"), [500, 500], "without a readable", id="no record"),
            pytest.param(
                b.share(
                    "p",
                    annotations={**record(), "vke.volcengine.com/container-multiple-gpu": "x"},
                    node="n1",
                    phase="Running",
                ),
                [0, 0],
                "",
                id="unreadable request",
            ),
        ],
    )
    def test_running_pod_without_a_valid_record_is_held_and_warned_about_once(
        self, replica: Replica, raw: Raw, expected: list[int], text: str
    ) -> None:
        put(replica, raw)
        replica.api.edit_pod("p", lambda pod: pod["metadata"].update(labels={"changed": "yes"}))
        replica.deliver()
        assert core_free(replica) == expected
        assert [(name, reason) for name, reason, _ in replica.events] == [("p", "UnknownCards")]
        assert text in replica.events[0][2]
        assert not replica.state.undecided_pods()

    def test_pod_of_which_one_container_ran_holds_on_every_card_what_that_container_requests(
        self, replica: Replica
    ) -> None:
        """The kubelet starts a container whose resource the node does not offer; the others wait for their cards."""
        raw = b.pod("p", b.container("ran", 10, 1024), b.container("waits", 50, 1024), node="n1")
        put(replica, ran(raw, "ran"))
        assert core_free(replica) == [900, 900]


class TestGiven:
    """Cards that the kubelet gave to pods without mgpu's decision, as the Device of the node reports."""

    def test_unknown_pod_holds_its_card_until_the_node_reports_otherwise(self, api: FakeApi) -> None:
        report(api, given_row())
        replica = Replica(api)
        assert core_free(replica) == [0, 1000]
        replica.freed.clear()
        report(api)
        replica.deliver()
        assert core_free(replica) == [1000, 1000]
        assert replica.freed == ["n1"]

    def test_pod_without_a_record_holds_the_reported_card_instead_of_all(self, api: FakeApi) -> None:
        """The upgrade case of Koordinator."""
        api.put("pods", whole("old", phase="Running"))
        replica = Replica(api)
        assert core_free(replica) == [0, 0]
        assert [reason for _, reason, _ in replica.events] == ["UnknownCards"]
        report(api, given_row())
        replica.deliver()
        assert core_free(replica) == [0, 1000]
        assert replica.state.undecided_pods() == ()

    def test_ids_of_other_resources_are_no_missing_cards(self, api: FakeApi) -> None:
        report(api, given_row(), {**given_row("uid-old", "mlx5_0"), "resourceName": "rdma/hca"})
        api.put("pods", whole("old", {"nvidia.com/gpu": "1", "rdma/hca": "1"}, phase="Running"))
        replica = Replica(api)
        assert core_free(replica) == [0, 1000]
        assert not replica.events

    def test_record_wins_over_the_report(self, api: FakeApi) -> None:
        report(api, given_row("uid-p"))
        api.put("pods", bound("1", 30))
        assert core_free(Replica(api)) == [1000, 700]

    def test_unreadable_report_leaves_the_last_one_in_force(self, api: FakeApi) -> None:
        report(api, given_row())
        replica = Replica(api)
        device = json.loads(json.dumps(api.devices["n1"]))
        device["metadata"]["annotations"][CHECKPOINTS] = '[{"podUID": '
        api.put("devices", device)
        replica.deliver()
        assert core_free(replica) == [0, 1000]
        assert [reason for _, reason, _ in replica.events] == ["BadCheckpoints"]

    def test_holding_has_the_name_of_its_pod_and_outlives_the_device(self, api: FakeApi) -> None:
        report(api, given_row())
        api.put("pods", old())
        replica = Replica(api)
        assert [(h.key, h.dialect) for h in replica.state.holdings()] == [("default/old", "nvidia")]
        api.remove("devices", "n1")
        replica.deliver()
        assert len(replica.state.holdings()) == 1

    @pytest.mark.parametrize("order", [("devices", "pods"), ("pods", "devices")])
    def test_order_of_pods_and_devices_makes_no_difference(self, api: FakeApi, order: tuple[str, str]) -> None:
        replica = Replica(api)
        report(api, given_row(), given_row("uid-gone", "GPU-n1-1"), given_row("uid-ended", "GPU-n1-1"))
        api.put("pods", old())
        api.put("pods", b.pod("gone", b.container("c"), node="n1", phase="Running"))
        api.put("pods", b.pod("ended", b.container("c"), node="n1", phase="Succeeded"))
        api.remove("pods", "gone")
        for kind in order:
            replica.deliver(kind)
        assert core_free(replica) == core_free(Replica(api)) == [0, 0]
        assert replica.state.holdings() == Replica(api).state.holdings()
        assert {h.name for h in replica.state.holdings()} == {"old", ""}

    @pytest.mark.parametrize("order", [("nodes", "devices"), ("devices", "nodes")])
    def test_node_that_is_gone_with_its_device_is_forgotten(self, api: FakeApi, order: tuple[str, str]) -> None:
        report(api, given_row())
        replica = Replica(api)
        for kind in order:
            assert len(replica.state.holdings()) == 1
            api.remove(kind, "n1")
            replica.deliver()
        api.put("nodes", b.node("n1"))
        replica.deliver()
        assert replica.state.holdings() == ()

    @pytest.mark.parametrize("is_stored", [True, False])
    def test_node_cannot_report_the_pod_of_another_node(self, *, is_stored: bool) -> None:
        """A stolen token of an agent can write any UID into the report of its own node."""
        api = cluster(("n1", 2), ("n2", 1))
        report(api, given_row())
        if is_stored:
            api.put("pods", old())
        replica = Replica(api)
        for rows in ([given_row("uid-old", "GPU-n2-0")], []):
            report(api, *rows, node="n2")
            replica.deliver()
            assert core_free(replica) == [0, 1000]
        report(api)
        replica.deliver()
        assert core_free(replica) == [1000, 1000]

    def test_node_cannot_report_a_pod_that_is_created_later_on_another_node(self) -> None:
        api = cluster(("n1", 2), ("n2", 1))
        report(api, given_row("uid-old", "GPU-n2-0"), node="n2")
        replica = Replica(api)
        report(api, given_row())
        put(replica, old())
        assert core_free(replica) == [0, 1000]


class TestBarePod:
    """Pods that run without a record, and that were given nothing, hold nothing.

    The kubelet starts a container whose resource its node does not offer without asking a plugin. For that, a tenant
    only needs `nodeName`, and every share that such a pod held on all cards of its node would be denied to others.
    """

    def test_pod_that_a_complete_report_leaves_out_holds_nothing(self, api: FakeApi) -> None:
        report(api, *COMPLETE)
        api.put("pods", ran(b.share("p", node="n1"), "c", phase="Running"))
        replica = Replica(api)
        assert free(replica) == [1000, 1000]
        ((_, reason, text),) = replica.events
        assert reason == "UnknownCards"
        assert "was given no cards; it holds nothing" in text
        assert replica.state.undecided_pods() == ()

    def test_pod_that_is_reported_holds_the_reported_card(self, api: FakeApi) -> None:
        report(api, given_row("uid-p", "GPU-n1-1"), *COMPLETE)
        api.put("pods", ran(b.share("p", node="n1"), "c"))
        assert free(Replica(api)) == [1000, 0]

    def test_pod_holds_everything_while_the_report_is_incomplete(self, api: FakeApi) -> None:
        """The report becomes incomplete again if an earlier agent takes the node over."""
        api.put("pods", ran(b.share("p", node="n1"), "c"))
        replica = Replica(api)
        for rows, expected in (([], [500, 500]), (COMPLETE, [1000, 1000]), ([], [500, 500])):
            report(api, *rows)
            replica.deliver()
            assert free(replica) == expected

    @pytest.mark.parametrize(
        ("raw", "labels", "expected", "read"),
        [
            pytest.param(ran(bound("banana"), "c"), {}, [500, 500], core_free, id="its record cannot be read"),
            pytest.param(
                ran(whole(), "c", phase="Running"), {WHOLE_CARDS_LABEL: "nvidia"}, [0, 0], free, id="of NVIDIA's plugin"
            ),
        ],
    )
    def test_pod_that_may_have_cards_holds_everything_until_it_is_reported_as_bare(
        self, api: FakeApi, raw: Raw, labels: dict[str, str], expected: list[int], read: Callable[[Replica], list[int]]
    ) -> None:
        report(api, *COMPLETE)
        api.put("nodes", b.node("n1", labels=labels))
        api.put("pods", raw)
        replica = Replica(api)
        assert read(replica) == expected
        report(api, *BARE, *COMPLETE)
        replica.deliver()
        assert read(replica) == [1000, 1000]

    def test_pod_with_a_container_that_waits_for_its_card_is_decided_late(self, api: FakeApi) -> None:
        report(api, *COMPLETE)
        raw = b.pod("p", b.container("ran", 10, 1024), b.container("waits", 50, 1024), node="n1")
        api.put("pods", ran(raw, "ran"))
        replica = Replica(api)
        assert free(replica) == [1000, 1000]
        assert list(replica.state.undecided_pods()) == ["uid-p"]

    def test_pod_that_requests_only_rdma_holds_none(self) -> None:
        """No node gives out rdma, so the container starts at once on every node."""
        api = cluster(("n1", 1))
        device = json.loads(json.dumps(api.devices["n1"]))
        resources = {"koordinator.sh/rdma": "100"}
        rdma = {"type": "rdma", "id": "0000:09:00.0", "minor": 0, "health": True, "resources": resources}
        device["spec"]["devices"].append(rdma)
        api.put("devices", device)
        api.put("pods", ran(whole("p", resources), "c"))
        (state,) = Replica(api).state.node_snapshot("n1", "").other_devices
        assert state.idle

    def test_pod_that_requests_slices_of_a_node_with_whole_cards_holds_no_card(self, api: FakeApi) -> None:
        """The kubelet of a node without slices does not know the resource of any profile."""
        report(api, *COMPLETE)
        api.put("pods", ran(wants("p", {"mig-1g.10gb": 1}, node="n1"), "a", phase="Running"))
        assert free(Replica(api)) == [1000, 1000]

    def test_pod_does_not_hold_a_profile_that_its_node_makes_later(self) -> None:
        """`1g.10gb.me` is no resource of the node, so its container runs; the other container waits for its slice."""
        replica, agents = partitioned_cluster(("n1", MIG, 1))
        agents["n1"].make(*slices((0, 0, "1g.10gb"), (0, 1, "1g.10gb")))
        report(replica.api, *COMPLETE)
        put(replica, ran(wants("p", {"mig-1g.10gb.me": 3}, {"mig-1g.10gb": 1}, node="n1"), "a"))
        agents["n1"].make(*slices((0, 2, "1g.10gb.me")))
        replica.deliver()
        assert all(state.idle for state in replica.state.node_snapshot("n1", "").other_devices)
        assert list(replica.state.undecided_pods()) == ["uid-p"]

    def test_slice_that_a_pod_without_a_record_was_given_stays_held(self) -> None:
        replica, agents = partitioned_cluster(("n1", MIG, 1))
        one, two = slices((0, 0, "1g.10gb"), (0, 1, "1g.10gb"))
        agents["n1"].make(one, two)
        agents["n1"].give("uid-p", one)
        report(replica.api, *COMPLETE)
        put(replica, ran(wants("p", {"mig-1g.10gb": 1}, node="n1"), "a", phase="Running"))
        assert [state.idle for state in replica.state.node_snapshot("n1", "").other_devices] == [False, True]

    def test_pod_that_requests_only_slices_is_decided_late_once_it_is_reported_as_bare(self) -> None:
        """The kubelet counts its request, and would fail each other pod for a slice of that profile."""
        replica, agents = partitioned_cluster(("n1", MIG, 1))
        agents["n1"].make(*slices((0, 0, "1g.10gb")))
        report(replica.api, *COMPLETE)
        put(replica, ran(wants("p", {"mig-1g.10gb.me": 9}, node="n1"), "a", phase="Running"))
        assert not replica.state.undecided_pods(), "its agent may not have seen it yet"
        report(replica.api, *BARE, *COMPLETE)
        replica.deliver()
        assert list(replica.state.undecided_pods()) == ["uid-p"]
