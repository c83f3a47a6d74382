"""MtgpuPods as `mgpu inspect` shows them, and their accounting."""

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from mgpu.model.device_object import write_device
from mgpu.model.pods import read_node
from mgpu.presentation.card_map import card_map
from mgpu.presentation.card_views import nodes_json
from mgpu.presentation.mtgpupod_tables import account_nodes, accounting_json, mtgpupods_json
from mgpu.presentation.overview import Overview, make_overview
from mgpu.settings import load_settings
from tests.builders import GIB, card, container, mtgpupod, node, occupy_pod, owned, pod, share

Raw = dict[str, Any]
CARDS = 4
DEVICE = write_device(read_node(node()), "", [card(i) for i in range(CARDS)])
SETTINGS = load_settings()


def seen(mtgpupods: Iterable[Raw], *pods: Raw) -> Overview:
    return make_overview([node()], [DEVICE], pods, SETTINGS, mtgpupods=mtgpupods)


def test_mtgpupods_of_a_gpuid_share_its_card_without_the_occupy_pod() -> None:
    two = [mtgpupod("a", request="0.2", bound="GPU-n1-1"), mtgpupod("b", request="0.4", bound="GPU-n1-1")]
    found = seen(two, occupy_pod(card=1))
    cards = nodes_json(found.nodes)["n1"]["cards"]
    assert [c["gpuid"] for c in cards] == [None, "zxcvb", None, None]
    assert cards[1]["core"] == {"used": 60, "total": 100}
    assert cards[1]["memory"]["used"] == 2 * GIB
    assert cards[1]["holders"] == ["default/a/c", "default/b/c"]
    assert (found.pending, found.unclear) == ((), {})


def test_containers_of_an_mtgpupod_hold_its_share_together() -> None:
    several = mtgpupod(request="0.3", bound="GPU-n1-0")
    several["spec"]["initContainers"] = [container("first")]
    several["spec"]["containers"].append(container("second"))
    (one, *_) = nodes_json(seen([several]).nodes)["n1"]["cards"]
    assert one["holders"] == ["default/m/c", "default/m/first", "default/m/second"]
    assert (one["core"]["used"], one["memory"]["used"]) == (30, GIB)


def test_occupy_pod_alone_reserves_its_card() -> None:
    alone = nodes_json(seen([], occupy_pod(card=2)).nodes)["n1"]["cards"][2]
    assert (alone["gpuid"], alone["core"]["used"], alone["holders"]) == (
        "zxcvb",
        0,
        ["kube-system/mtgpupod-occupypod-n1-zxcvb/occupy"],
    )
    cards = nodes_json(seen([mtgpupod(bound="GPU-n1-0")], occupy_pod(card=3)).nodes)["n1"]["cards"]
    assert [(c["gpuid"], c["core"]["used"]) for c in cards] == [("zxcvb", 20), (None, 0), (None, 0), (None, 100)]


def test_occupy_pod_on_another_node_is_an_ordinary_pod() -> None:
    cards = nodes_json(seen([], {**occupy_pod(node="n2", card=1), "spec": occupy_pod()["spec"]}).nodes)["n1"]["cards"]
    assert [(c["gpuid"], c["core"]["used"]) for c in cards][1] == (None, 100)


def test_mtgpupod_without_card_waits_with_the_reason_of_its_condition() -> None:
    waits = mtgpupod()
    bound = {"type": "Bound", "status": "False", "reason": "ResourceExceeded", "message": "no idle card"}
    waits["status"]["conditions"] = [bound]
    found = seen([waits])
    assert found.pending == ("default/m",)
    assert mtgpupods_json(found.mtgpupods)["default/m"] == {
        "node": "n1",
        "gpuid": "zxcvb",
        "card": None,
        "phase": "Pending",
        "reason": "ResourceExceeded",
        "message": "no idle card",
        "degraded": None,
    }
    assert all(not c.uses for c in found.nodes[0].cards)


def test_mtgpupod_is_degraded_only_if_the_condition_is_true() -> None:
    raw = mtgpupod(bound="GPU-n1-0")
    for status, told in (("True", "elsewhere"), ("False", "")):
        raw["status"]["conditions"] = [{"type": "Degraded", "status": status, "message": "elsewhere"}]
        assert seen([raw]).mtgpupods[0].degraded == told


def own_pod(card: str = "", **more: Any) -> Raw:
    """Return the view of the MtgpuPod `m`."""
    raw = {**mtgpupod(uid="of-its-pod", **more), "kind": "Pod"}
    raw["metadata"]["ownerReferences"] = [owned()]
    raw["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": card}] if card else []
    return raw


def test_ended_mtgpupod_holds_nothing_unless_its_pod_runs() -> None:
    ended = mtgpupod(bound="GPU-n1-0", phase="Failed")
    assert seen([ended]).nodes[0].cards[0].state.idle
    assert not seen([ended]).mtgpupods
    assert seen([ended], own_pod("GPU-n1-0", phase="Running")).nodes[0].cards[0].state.gpuid == "zxcvb"
    assert seen([ended], own_pod("GPU-n1-0", phase="Failed")).nodes[0].cards[0].state.idle
    orphan = pod("m", container(), node="n1", phase="Running", uid="of-its-pod")
    remembered = {**ended, "status": {**ended["status"], "PodObjectMeta": {"uid": "of-its-pod"}}}
    assert seen([remembered], orphan).nodes[0].cards[0].state.gpuid == "zxcvb"


def test_share_is_held_if_the_mtgpupod_or_its_status_is_lost() -> None:
    running = own_pod("GPU-n1-2", phase="Running", request="0.3")
    for lost in ([], [mtgpupod(request="0.3")]):
        found = seen(lost, running)
        (card,) = [card for card in found.nodes[0].cards if card.state.gpuid == "zxcvb"]
        assert (card.state.card.index, card.state.core_used, card.holders) == (2, 300, ["default/m/c"])
        assert not found.pending


def test_injected_first_container_does_not_hide_the_card() -> None:
    running = own_pod("GPU-n1-2", phase="Running")
    running["spec"]["containers"].insert(0, container("mesh"))
    assert seen([], running).nodes[0].cards[2].state.gpuid == "zxcvb"


def test_unreadable_mtgpupod_is_unclear_and_holds_its_whole_card() -> None:
    odd = mtgpupod("odd", gpuid="Not Good", bound="GPU-n1-2")
    worse = {"metadata": {"namespace": "x", "name": "worse"}, "spec": 3}
    away = mtgpupod("away", gpuid="other", bound="GPU-gone")
    found = seen([odd, worse, away])
    assert set(found.unclear) == {"MtgpuPod default/odd", "MtgpuPod x/worse", "MtgpuPod default/away"}
    assert "GPU-gone" in found.unclear["MtgpuPod default/away"]
    assert found.nodes[0].cards[2].state.core_used == 1000


def drawn(found: Overview, width: int = 100) -> str:
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(card_map(found.nodes))
    return captured.get()


def test_card_map_shows_the_gpuid_and_the_kind() -> None:
    text = drawn(
        seen([mtgpupod("a", bound="GPU-n1-1", memory=20 * GIB)], occupy_pod(card=1), occupy_pod("new", card=2))
    )
    head, core, mem = text.splitlines()[1:4]
    for part in ("0 idle", "1 zxcvb 20% 20 GiB", "2 new 0% 0 B"):
        assert part in head
    assert (core.count("A"), mem.count("A")) == (4, 5)
    assert "A default/a · MtgpuPod · 20% 20 GiB on 1" in text
    assert "B kube-system/mtgpupod-occupypod-n1-new · keeps card 2" in text
    assert "occupypod-n1-zxcvb" not in text


def test_long_gpuid_is_shortened() -> None:
    text = drawn(seen([mtgpupod(gpuid="q" * 63, bound="GPU-n1-0")]), 80)
    assert "0 q" in text
    assert "… 20% 1 GiB" in text
    assert max(map(len, text.splitlines())) == 80


def test_pod_without_amount_is_not_in_a_coloured_bar() -> None:
    console = Console(width=100, force_terminal=True, color_system="truecolor")
    with console.capture() as captured:
        console.print(card_map(seen([], occupy_pod(card=0)).nodes), crop=False)
    head, core, *_ = Text.from_ansi(captured.get()).plain.splitlines()[1:]
    assert "0 zxcvb 0% 0 B" in head
    assert core.split("core")[1].strip(" │").startswith("·")


def seeds_accounting(cards: int, pods: Iterable[Raw], mtgpupods: Iterable[Raw]) -> tuple[int, dict[str, int]]:
    """Compute the accounting of one node by the pseudo-code of K8sGPUSharing, in thousandths, without ended pods."""
    available = cards
    allocated: dict[str, int] = {}
    for raw in pods:
        if "mtgpupod-occupypod" not in raw["metadata"]["name"] and raw["status"]["phase"] == "Running":
            limits = (c["resources"]["limits"] for c in raw["spec"]["containers"])
            available -= sum(int(amounts["nvidia.com/gpu"]) for amounts in limits)
    for raw in mtgpupods:
        if raw["status"]["phase"] == "Running":
            gpuid = raw["metadata"]["annotations"]["lsalab.nthu/GPUID"]
            request = round(float(raw["metadata"]["annotations"]["lsalab.nthu/gpu_request"]) * 1000)
            if gpuid in allocated:
                allocated[gpuid] -= request
            else:
                available -= 1
                allocated[gpuid] = 1000 - request
    return available, allocated


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Raw], list[Raw]]:
    """Each card has no pod, one pod that holds all of it, or up to four MtgpuPods with or without an occupy pod."""
    phases = st.sampled_from(["Running", "Running", "Succeeded", "Failed"])
    pods: list[Raw] = []
    named: list[Raw] = []
    for i in range(CARDS):
        kind = draw(st.sampled_from(["idle", "whole", "named"]))
        if kind == "whole":
            raw = {**occupy_pod(card=i), "status": {"phase": draw(phases)}}
            meta = {**raw["metadata"], "name": f"w{i}", "uid": f"w{i}", "namespace": "default", "labels": {}}
            pods.append({**raw, "metadata": meta})
        elif kind == "named":
            requests = draw(st.lists(st.integers(0, 250), min_size=1, max_size=4))
            users = [
                mtgpupod(f"m{i}-{j}", f"id{i}", f"{r / 1000:.3f}", bound=f"GPU-n1-{i}", phase=draw(phases))
                for j, r in enumerate(requests)
            ]
            named += users
            if draw(st.booleans()) and any(user["status"]["phase"] == "Running" for user in users):
                pods.append(occupy_pod(f"id{i}", card=i, phase="Running"))
    return draw(st.permutations(pods)), draw(st.permutations(named))


@given(clusters())
def test_accounting_equals_that_of_k8sgpusharing(cluster: tuple[list[Raw], list[Raw]]) -> None:
    pods, named = cluster
    free, left = seeds_accounting(CARDS, pods, named)
    (account,) = account_nodes(seen(named, *pods).nodes)
    assert (account.free, {x.gpuid: x.core for x in account.gpuids}) == (free, left)


def test_shared_and_unhealthy_cards_are_not_free() -> None:
    record = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}
    broken = write_device(read_node(node()), "", [card(0), card(1, healthy=False), card(2), card(3)])
    pool, named = share(node="n1", annotations=record), mtgpupod(bound="GPU-n1-3", memory=3 * GIB)
    found = make_overview([node(), node("bare")], [broken], [pool], SETTINGS, mtgpupods=[named])
    left = {"gpuid": "zxcvb", "card": 3, "core": 80, "memory": 77 * GIB}
    assert accounting_json(account_nodes(found.nodes)) == {"n1": {"free": 1, "gpuids": [left]}}
