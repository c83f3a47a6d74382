"""The feed sends everything first and then changes, with the waiting pods and their reasons."""

import gzip
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from mgpu.model.node_slices import EXISTING, LABEL
from scheduler.api.page import feed as board_module
from scheduler.api.page import waiting_list as waiting_module
from scheduler.api.page.feed import EVERY_SECONDS, Board
from scheduler.api.page.page_app import make_board
from scheduler.api.page.waiting_list import Waiting
from scheduler.background import Pace
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.filter import Filtered
from scheduler.decisions.gang_outlook import GangOutlooks
from tests import builders as b
from tests.clock import Clock
from tests.scheduler.fake import Replica, cluster

INDEX = "vke.volcengine.com/gpu-index-container-c"
RECORD = {"vke.volcengine.com/assumed": "true", INDEX: "0"}


@dataclass
class Page:
    """A page in the browser that shows `replica`."""

    replica: Replica
    clock: Clock = field(default_factory=Clock)
    version: str = ""
    beside: Callable[[Callable[[], None]], None] = lambda work: work()

    def __post_init__(self) -> None:
        state, filter_ = self.replica.state, self.replica.filter
        gangs = GangOutlooks(state, filter_, self.replica.settings)
        waiting = Waiting(state, filter_, gangs, Pace(0), lambda work: self.beside(work), self.clock)
        self.board = Board(self.replica.state, waiting, self.clock)

    def requests(self, version: str | None = None) -> dict[str, Any]:
        self.replica.deliver()
        self.clock.now += EVERY_SECONDS
        answer = self.again(version)
        self.version = answer["version"]
        return answer

    def again(self, version: str | None = None) -> dict[str, Any]:
        """Return the next answer at the same time of the clock."""
        packed = self.board.since(self.version if version is None else version, "")
        answer: dict[str, Any] = json.loads(gzip.decompress(packed))
        return answer


@pytest.fixture
def page() -> Page:
    return Page(Replica(cluster(("n1", 2), ("n2", 1))))


def names(answer: dict[str, Any]) -> list[str]:
    return sorted(node["name"] for node in answer["nodes"])


def test_first_answer_has_everything_and_later_ones_the_changes(page: Page) -> None:
    first = page.requests()
    assert (first["whole"], names(first), first["todo"]) == (True, ["n1", "n2"], 0)
    quiet = page.requests()
    assert (quiet["whole"], names(quiet), quiet["pending"]) == (False, [], None)
    assert quiet["version"] == first["version"]
    page.replica.api.put("pods", b.share("p", annotations=RECORD, node="n2"))
    assert names(page.requests()) == ["n2"]
    assert names(page.requests()) == []


def test_change_without_effect_on_the_page_is_not_sent(page: Page) -> None:
    page.requests()
    page.replica.api.put("nodes", b.node("n1", labels={"some": "label"}))
    assert names(page.requests()) == []


def test_deleted_and_recreated_nodes_are_sent(page: Page) -> None:
    old = page.requests()["version"]
    page.replica.api.remove("nodes", "n2")
    gone = page.requests()
    assert (gone["gone"], names(gone)) == (["n2"], [])
    page.replica.api.put("nodes", b.node("n2"))
    assert names(page.requests()) == ["n2"]
    assert names(page.requests(old)) == ["n2"]
    assert names(page.requests("")) == ["n1", "n2"]


@pytest.mark.parametrize("version", ["other.1", "x", "-1", "1", ".", "9" * 500, "\N{SUPERSCRIPT TWO}"])
def test_unknown_version_gets_everything(page: Page, version: str) -> None:
    epoch = page.requests()["version"].partition(".")[0]
    for unknown in (version, f"{epoch}.{version}"):
        if unknown != f"{epoch}.1":
            assert page.requests(unknown)["whole"]


def test_version_before_forgotten_deletions_gets_everything(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "MAX_DELETED", 1)
    old = page.requests()["version"]
    for name in ("n1", "n2"):
        page.replica.api.remove("nodes", name)
    page.requests()
    page.replica.api.put("nodes", b.node("n3"))
    assert page.requests(old)["whole"]


def test_concurrent_viewers_cause_one_refresh(page: Page) -> None:
    version = page.requests()["version"]
    page.replica.api.put("pods", b.share("p", annotations=RECORD, node="n2"))
    page.replica.deliver()
    assert page.again(version)["version"] == version
    assert names(page.requests(version)) == names(page.again(version)) == ["n2"]


def test_answer_is_cached_for_equal_versions(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "MAX_ANSWERS", 2)
    old = page.requests()["version"]
    page.replica.api.put("pods", b.share("p", annotations=RECORD, node="n2"))
    new = page.requests()["version"]
    for since in ("", old, new):
        assert page.board.since(since, "") is page.board.since(since, "")
    assert [names(page.again(since)) for since in ("", old, new)] == [["n1", "n2"], ["n2"], []]
    assert json.loads(gzip.decompress(page.board.since(new, "another replica leads")))["replica"]


def test_long_refresh_sends_nodes_in_parts(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "REFRESH_SECONDS", -1.0)
    first = page.requests()
    assert (len(first["nodes"]), first["todo"]) == (1, 1)
    page.version = first["version"]
    rest = page.again()  # at once
    assert (rest["whole"], len(rest["nodes"]), rest["todo"]) == (False, 1, 0)
    assert {*names(first), *names(rest)} == {"n1", "n2"}


def pending(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = page.requests("")["pending"]
    return found


def why(page: Page, name: str) -> str:
    told = pending(page)
    row = next(row for row in told["pods"] if row["name"] == name)
    return "; ".join(reason["text"] for reason in told["whys"][row["why"]]["reasons"])


def test_waiting_pod_is_listed_with_its_reason(page: Page) -> None:
    page.replica.api.put("pods", b.share("p", 50, 90 * 1024))
    told = pending(page)
    assert [(row["name"], row["asks"], row["why"]) for row in told["pods"]] == [
        ("default/p", "c: 50% and 90.0 GiB of one card", 0)
    ]
    (said,) = told["whys"]
    assert (said["fits"], said["of"]) == (0, 2)
    assert "memory 10.0 GiB short" in why(page, "default/p")
    page.replica.api.remove("pods", "p")
    assert pending(page) == {"total": 0, "pods": [], "whys": [], "gangs": [], "moreGangs": 0}


def test_equal_pods_share_a_reason_that_follows_the_cards(page: Page) -> None:
    for name in "pq":
        page.replica.api.put("pods", b.share(name, 80))
    page.replica.api.put("pods", b.share("x", 80, annotations=RECORD, node="n2"))
    told = pending(page)
    assert [row["why"] for row in told["pods"]] == [0, 0]
    assert told["whys"][0]["fits"] == 1
    page.replica.api.remove("pods", "x")
    assert pending(page)["whys"][0]["fits"] == 2


def test_reasons_count_existing_nodes(page: Page) -> None:
    page.replica.api.put("pods", b.share("p", 50, 90 * 1024))
    assert pending(page)["whys"][0]["of"] == 2
    page.replica.api.remove("nodes", "n2")
    for _ in range(2):
        assert pending(page)["whys"][0]["of"] == 1


def in_time(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the reasons that the page of the replica computes."""
    monkeypatch.setattr(board_module, "EVERY_SECONDS", 0.0)
    replica.deliver()
    board, until = make_board(replica.state, replica.settings), time.monotonic() + 60
    found: list[dict[str, Any]] = []
    while not found:
        assert time.monotonic() < until
        found = json.loads(gzip.decompress(board.since("", "")))["pending"]["whys"]
    return found


def test_viewing_a_pod_makes_no_plan(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter for kube-scheduler requests a plan for the same pod."""
    replica = page.replica
    replica.api.put("nodes", b.node("n1", labels={LABEL: "mig"}, **{EXISTING: json.dumps({"cards": {"0": []}})}))
    slice_ = {"name": "c", "image": "cuda", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}
    pod = replica.api.put("pods", b.pod("p", slice_))
    replica.deliver()
    (why,) = in_time(replica, monkeypatch)
    assert why["recut"] == 1
    replica.planning.work()
    assert replica.state.partitions.plans() == ()
    known = replica.decider.read(pod)
    assert known is not None
    replica.filter.filter(known, ["n1"])
    replica.planning.work()
    assert len(replica.state.partitions.plans()) == 1


def test_answers_do_not_wait_for_reasons(page: Page) -> None:
    works: list[Callable[[], None]] = []
    page.beside = works.append
    for i in range(2):
        page.replica.api.put("pods", b.share(f"p{i}", 50, 90 * 1024 + i))
    for _ in range(2):
        assert [row["why"] for row in pending(page)["pods"]] == [-1, -1]
    (work,) = works  # one at a time
    work()
    assert [row["why"] for row in pending(page)["pods"]] == [0, 1]
    assert len(works) == 1  # nothing is due
    page.replica.api.put("pods", b.share("x", 80, annotations=RECORD, node="n2"))
    assert len(pending(page)["whys"]) == 2  # what was known is shown until there is better
    assert len(works) == 2


def test_thread_of_reasons_ends(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    page.replica.api.put("pods", b.share("p", 50, 90 * 1024))
    assert in_time(page.replica, monkeypatch)[0]["fits"] == 0
    for thread in threading.enumerate():
        if thread.name == "reasons":
            thread.join(60)
            assert not thread.is_alive()


def test_failed_reason_does_not_delay_others(
    page: Page, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = page.replica.filter.filter

    def fails_for_p(known: GpuPod, names: Sequence[str]) -> Filtered:
        if known.pod.name == "p":
            raise ZeroDivisionError
        return asked(known, names)

    monkeypatch.setattr(page.replica.filter, "filter", fails_for_p)
    for i, name in enumerate("pq"):
        page.replica.api.put("pods", b.share(name, 50, 90 * 1024 + i))
    assert "the scheduler's log has the details" in why(page, "default/p")
    assert "short" in why(page, "default/q")
    assert "ZeroDivisionError" in caplog.text


def test_malformed_and_undecided_pods_are_listed_with_reasons(page: Page) -> None:
    page.replica.api.put("pods", b.share("p", 150))
    page.replica.api.put("pods", b.share("q", node="n1"))
    page.replica.deliver()
    assert "multiple of 100" in why(page, "default/p")
    assert "bound to n1" in why(page, "default/q")


def test_waiting_mtgpupod_is_listed_with_its_condition(page: Page) -> None:
    waiting = b.mtgpupod("m")
    said = {"type": "Bound", "status": "False", "reason": "NoFreeCard", "message": "all cards of n1 are in use"}
    waiting["status"]["conditions"] = [said]
    for raw in (waiting, b.mtgpupod("there", bound="GPU-n1-0")):
        page.replica.api.put("mtgpupods", raw)
    assert why(page, "default/m") == "NoFreeCard: all cards of n1 are in use"
    assert pending(page)["total"] == 1


def test_long_list_is_cut_short_but_counted(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "MOST", 2)
    for i in range(5):
        page.replica.api.put("pods", b.share(f"p{i}", 50, 90 * 1024))
    told = pending(page)
    assert (told["total"], [row["name"] for row in told["pods"]]) == (5, ["default/p0", "default/p1"])


def test_pod_with_constraints_is_listed_with_its_wishes(page: Page) -> None:
    page.replica.api.put("pods", b.share("p", 50, annotations={"mgpu.io/card-models": "H100"}))
    (row,) = pending(page)["pods"]
    assert "H100" in row["wishes"]  # the key that static/waiting.js reads


def member(name: str, **more: Any) -> dict[str, Any]:
    raw = b.share(name, 60, **more)
    raw["metadata"]["labels"] = {"mgpu.io/gang": "train", "mgpu.io/gang-size": "4"}
    return raw


def test_gang_that_is_not_complete_is_listed_with_the_reason(page: Page) -> None:
    page.replica.api.put("pods", member("train-0", annotations=RECORD, node="n2"))
    for i in (1, 2, 3):
        page.replica.api.put("pods", member(f"train-{i}"))
    page.replica.api.put("pods", b.share("x", 80, annotations=RECORD, node="n1"))
    told = pending(page)
    (gang,) = told["gangs"]
    assert gang["name"] == "default/train"
    assert gang["text"].startswith("1 of 4 placed; 1 more fits now, but train-2 does not fit: 1 node: ")
    assert gang["pods"] == ["default/train-1", "default/train-2", "default/train-3"]
    assert {row["gang"] for row in told["pods"]} == {"default/train"}
    page.replica.api.remove("pods", "x")
    (gang,) = pending(page)["gangs"]
    assert "2 more fit now, but train-3 does not fit" in gang["text"]


def test_gang_is_listed_before_its_reason_is_known(page: Page) -> None:
    page.beside = lambda _work: None
    page.replica.api.put("pods", member("train-0"))
    (gang,) = pending(page)["gangs"]
    assert gang["text"] == "0 of 4 placed; 3 more pods do not exist yet; waiting: train-0"
    assert "at" not in gang


def test_long_list_of_gangs_is_cut_short_but_counted(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "MOST_GANGS", 2)
    for i in range(5):
        raw = member(f"p{i}")
        raw["metadata"]["labels"]["mgpu.io/gang"] = f"g{i}"
        page.replica.api.put("pods", raw)
    told = pending(page)
    assert ([gang["name"] for gang in told["gangs"]], told["moreGangs"]) == (["default/g0", "default/g1"], 3)
