"""Claims are held to their shares like pods, as far as the isolation back end can."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.dra.claim_limits import ClaimLimits
from deviceplugin.dra.claim_records import ClaimRecord
from deviceplugin.dra.claim_views import view_in
from deviceplugin.isolation.backend import Ability
from deviceplugin.isolation.isolation import Isolation, Policy
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import Refused
from mgpu.model.isolation import HAMI_CORE, MPS
from playground.cri import Cri
from playground.nvml_state import cgroup_root, set_driver
from tests.builders import GIB
from tests.deviceplugin.dra.claims import claim, claim_pod, request, uid_of, using
from tests.deviceplugin.dra.rig import ClaimNode
from tests.deviceplugin.dra.test_agent import deploy
from tests.deviceplugin.fake_node import FixedGpus
from tests.deviceplugin.isolation.driver.test_agent import EVENTS, hard
from tests.deviceplugin.isolation.mps.fake import lives, pid_of
from tests.deviceplugin.isolation.mps.test_agent import settings as mps_settings
from tests.deviceplugin.isolation.test_isolation import ALL, FakeBackend, NoSlices
from tests.deviceplugin.node import PODS, Node
from tests.waiting import until


class IsolatedNode(ClaimNode):
    """A node with isolation back ends.

    Attributes:
        backend: The only back end.
        said: What is not enforced, with the name of the claim.
    """

    def __init__(self, folder: Path, able: Ability = ALL, name: str = MPS, *, required: bool = False) -> None:
        self.backend = FakeBackend(name, able)
        self.policy = Policy(name, required)
        self.said: list[tuple[str, str]] = []
        super().__init__(folder)

    def make_isolation(self) -> Isolation:
        backends = {self.backend.name: self.backend}
        return Isolation(backends, NoSlices(), self.policy, self.claims, FixedGpus(self.cards), self._say)

    def _say(self, gpu_pod: GpuPod, text: str) -> None:
        self.said.append((gpu_pod.pod.name, text))


def offered(node: ClaimNode, raw: dict[str, Any], *pods: dict[str, Any]) -> None:
    node.api.put(raw)
    node.take(*(pods or (claim_pod(),)))


def test_back_end_adds_its_edits_to_the_view(folder: Path) -> None:
    node = IsolatedNode(folder)
    offered(node, claim(owner="p"))
    env = node.env(node.prepare())
    assert (env["LIMIT"], env["MGPU_ISOLATION"]) == ("mps", "mps")
    assert node.backend.prepared == [(uid_of("a"), "gpu")]


def test_whole_card_is_not_limited(folder: Path) -> None:
    node = IsolatedNode(folder)
    offered(node, claim("a", request(cores=None, memory=None), owner="p"))
    assert "LIMIT" not in node.env(node.prepare())


def test_agent_that_restarts_finds_the_limited_claims(folder: Path) -> None:
    node = IsolatedNode(folder)
    offered(node, claim(owner="p"))
    node.prepare()
    node.restart()
    assert [*node.backend.recovered] == [(uid_of("a"), "gpu")]


def test_only_the_views_of_the_pod_are_limited(folder: Path) -> None:
    """A claim of a template belongs to one pod. kube-scheduler makes such claims for extended resources, too."""
    node = IsolatedNode(folder)
    raw = claim("a", request("x"), request("y"), cards=[0, 1], owner="p")
    offered(node, raw, claim_pod("p", using("c", "a/x"), using("d", "a/y")))
    node.prepare()
    assert node.backend.prepared == [(uid_of("a"), "x"), (uid_of("a"), "y")]


def views_of(record: ClaimRecord) -> set[str]:
    """Return the views with a CDI device. The runtime starts no container with a device that has none."""
    uid = uid_of("a")
    return {view for row in record.spec["devices"] if (view := view_in(uid, row["name"])) is not None}


def test_view_that_is_not_limited_cannot_be_used_by_another_pod(folder: Path) -> None:
    """Another pod may name the claim of a template, and the kubelet does not call for the claim again."""
    node = IsolatedNode(folder)
    raw = claim("a", request("x"), request("y"), cards=[0, 1], pods=["p", "q"], owner="p")
    offered(node, raw, claim_pod("p", using("c", "a/x")))
    assert views_of(node.prepare()) == {"x"}


def test_all_views_are_limited_for_a_container_that_references_the_whole_claim(folder: Path) -> None:
    node = IsolatedNode(folder)
    raw = claim("a", request("x"), request("y"), cards=[0, 1], owner="p")
    offered(node, raw, claim_pod("p", using("c", "a")))
    assert views_of(node.prepare()) == {"x", "y", "claim.all"} == {view for _, view in node.backend.prepared}


def test_limits_of_single_requests_do_not_hold_for_a_container_with_the_whole_claim(folder: Path) -> None:
    """A back end like MPS limits each request on its card, and cannot limit a container on both cards."""
    node = IsolatedNode(folder, Ability(memory=True, compute=True, several_cards=False))
    raw = claim("a", request("x"), request("y"), cards=[0, 1], owner="p")
    offered(node, raw, claim_pod("p", using("c", "a"), using("d", "a/x")))
    record = node.prepare()
    assert [view for _, view in node.backend.prepared] == ["x", "y"]
    assert node.env(record)["LIMIT"] == "no limit"
    assert node.env(record)["MGPU_ISOLATION"] == "none"
    assert node.env(record, "x").items() >= {"LIMIT": "mps", "MGPU_ISOLATION": "mps"}.items()
    ((_, text),) = node.said
    assert "it has shares of 2 cards" in text
    node.restart()
    assert [*node.backend.recovered] == [(uid_of("a"), "x"), (uid_of("a"), "y")]


def test_whole_card_and_a_share_in_one_container_are_two_cards_for_the_back_end(folder: Path) -> None:
    node = IsolatedNode(folder)
    raw = claim("a", request("x", None, None), request("y"), cards=[0, 1], owner="p")
    offered(node, raw, claim_pod("p", using("c", "a")))
    node.prepare()
    assert node.backend.limited[-1] == tuple(node.cards[:2])


def test_card_with_administrative_access_is_one_of_the_cards_for_the_back_end(folder: Path) -> None:
    node = IsolatedNode(folder)
    raw = claim("a", request("x"), request("y"), cards=[0, 1], owner="p")
    raw["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = True
    offered(node, raw, claim_pod("p", using("c", "a")))
    node.prepare()
    assert dict(zip(node.backend.prepared, node.backend.limited, strict=True)) == {
        (uid_of("a"), "y"): (node.cards[1],),
        (uid_of("a"), "claim.all"): tuple(node.cards[:2]),
    }


def test_hooks_of_several_views_do_not_add_up(folder: Path) -> None:
    node = IsolatedNode(folder)
    offered(node, claim("a", request("x"), request("y"), cards=[0, 1]))
    record = node.prepare()
    assert {view for _, view in node.backend.prepared} == {"x", "y", "claim.all"}
    assert all("hooks" not in row["containerEdits"] for row in record.spec["devices"])


@pytest.mark.parametrize(
    ("owner", "pods"),
    [("p", [claim_pod("p", using("c", "a"), using("d", "a"))]), (None, [claim_pod()])],
)
def test_claim_of_several_containers_is_not_limited_by_a_library(
    folder: Path, owner: str | None, pods: list[dict[str, Any]]
) -> None:
    able = Ability(memory=True, compute=True, several_cards=True, sharable=False)
    node = IsolatedNode(folder, able, HAMI_CORE)
    offered(node, claim(owner=owner), *pods)
    assert "LIMIT" not in node.env(node.prepare())
    ((name, text),) = node.said
    assert name == "a"
    assert "the share of ResourceClaim a is not enforced: several containers may use it" in text


def test_claim_that_cannot_be_limited_is_refused_if_limits_are_required(folder: Path) -> None:
    able = Ability(memory=True, compute=False, several_cards=True)
    node = IsolatedNode(folder, able, required=True)
    offered(node, claim(owner="p"))
    with pytest.raises(Refused, match=r"its compute on card 0 is not limited.*isolationRequired"):
        node.prepare()
    assert node.claims.holdings() == ()


def test_limits_of_running_containers_come_from_what_they_reference(folder: Path) -> None:
    node = ClaimNode(folder)
    raw = claim("a", request("x", 10, "1Gi"), request("y", 20, "2Gi"), cards=[0, 0])
    offered(node, raw, claim_pod("p", using("c", "a/x"), using("d", "a")))
    node.prepare()
    limits = ClaimLimits(node.claims, node.users, node.gpus)
    ((key, found),) = limits.limits_of("uid-p", "c")
    assert (key, [(one.memory, one.compute) for one in found]) == ((uid_of("a"), "x"), [(GIB, 100)])
    ((key, found),) = limits.limits_of("uid-p", "d")
    assert (key, [(one.memory, one.compute) for one in found]) == ((uid_of("a"), "claim.all"), [(3 * GIB, 300)])
    assert limits.limits_of("uid-p", "other") == ()
    assert limits.limits_of("uid-q", "c") == ()


def test_use_of_a_container_is_compared_with_what_it_sees_of_its_claims(folder: Path) -> None:
    node = ClaimNode(folder)
    raw = claim("a", request("x", 10, "1Gi"), request("y", None, None), cards=[0, 1])
    offered(node, raw, claim_pod("p", using("c", "a/x"), using("d", "a"), using("plain")))
    node.prepare()
    found = ClaimLimits(node.claims, node.users, node.gpus).uses()
    rows = [(use.container, use.card.index, use.limit, use.whole) for use in found]
    assert rows == [("c", 0, GIB, False), ("d", 0, GIB, False), ("d", 1, 80 * GIB, True)]
    assert {use.claims for use in found} == {("a",)}
    assert {(use.uid, use.namespace, use.pod) for use in found} == {("uid-p", "default", "p")}


@pytest.fixture
def limited(node: Node) -> Iterator[Node]:
    """The node with driver R615, cgroups of version 2, and the socket of its container runtime."""
    set_driver(node.nvml, "615.65.06", memory_accounting="dmem")
    cgroup_root(node.nvml).mkdir(exist_ok=True)
    (cgroup_root(node.nvml) / "cgroup.controllers").touch()
    service = Cri(node.folder / "cri.sock", node.runtime)
    service.start()
    yield node
    service.stop()


def test_driver_limits_the_containers_of_the_pods_that_use_a_claim(limited: Node) -> None:
    node = limited
    settings = {"isolation": "driver", "cgroupDir": str(cgroup_root(node.nvml)), "dra.enabled": True}
    with node.agent(**settings):
        deploy(node, "p")
        node.runs("p")
        assert node.env("p")["MGPU_ISOLATION"] == "driver"
        until(lambda: hard(node, "p") == 8 * GIB)
        said = until(lambda: [e for e in node.api.get(EVENTS)["items"] if e["reason"] == "MgpuNotEnforced"])
        assert said[0]["involvedObject"]["name"] == "p"
        assert (
            "the share of ResourceClaim of-p is not enforced: its compute on card 0 is not limited"
            in said[0]["message"]
        )
    with node.agent(**settings):
        until(lambda: hard(node, "p") == 8 * GIB)


def test_mps_daemon_runs_from_the_preparation_of_a_claim_until_it_is_unprepared(node: Node) -> None:
    settings = {**mps_settings(node), "dra.enabled": True}
    with node.agent(**settings):
        deploy(node, "p")
        node.runs("p")
        assert node.env("p").items() >= {"MGPU_ISOLATION": "mps", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"}.items()
        assert node.env("p")["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"
        daemon = pid_of(node.folder / "mps")
    assert lives(daemon)
    with node.agent(**settings):
        node.create(claim_pod("other", claims=["none"]))
        assert lives(daemon)
        node.api.delete(f"{PODS}/p")
        until(lambda: not lives(daemon))
