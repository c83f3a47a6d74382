"""Claims with which a tenant tries to use up the time or the memory of the scheduler."""

import time
from dataclasses import replace
from typing import Any

import pytest

from mgpu.model.claim_object import read_claim
from mgpu.model.converted_requests import CONVERTED, ConvertedRequest, ConvertedRequests, pod_claim
from mgpu.model.gpu_requests import Rejection, RejectionKind
from scheduler.decisions import claim_selectors, selector_functions
from scheduler.decisions.claim_decider import ClaimDecider
from scheduler.decisions.claim_selectors import Selectors, Unsupported
from scheduler.decisions.effort_budgets import EffortBudgets
from scheduler.decisions.instance_filter import InstanceFilter
from tests import builders as b
from tests.scheduler.claim_objects import Raw, claim, request, serving, submit, waiting_pod
from tests.scheduler.cluster.objects import put, record
from tests.scheduler.fake import Replica

UUID = "gpu.mgpu.io/uuid"


def assess(replica: Replica, raw: Raw, budgets: EffortBudgets | None = None) -> Rejection | None:
    """Return why a claim does not fit on the node `n1`, as the waker asks it."""
    found = read_claim(raw)
    api: Any = replica.api
    decider = ClaimDecider(replica.state, api, replica.settings, budgets)
    names = {one.name for one in found.requests}
    return decider.assess(found, names, replica.state.node_snapshot("n1", found.uid))


def test_huge_count_is_rejected_at_once() -> None:
    """The API server accepts any count. Two thousand million results filled the memory."""
    rejection = assess(serving(("n1", 2)), claim("c", request(cores=1, memory="1Mi", count=2_000_000_000)))
    assert str(rejection) == "the claim requests more than 32 devices"


def test_many_requests_for_many_cards_are_rejected_at_once() -> None:
    rows = [request(f"r{i}", cores=1, memory="1Mi", count=2) for i in range(17)]
    assert str(assess(serving(("n1", 2)), claim("c", *rows))) == "the claim requests more than 32 devices"


@pytest.mark.parametrize(("cards", "is_charged"), [(32, True), (1, False)])
def test_search_for_one_request_for_several_cards_is_charged(cards: int, is_charged: bool) -> None:
    budgets = EffortBudgets(clock=lambda: 0.0, sleep=lambda _: None)
    before = budgets.remaining("default")
    raw = claim("c", request(cores=20, memory="1Gi", count=cards), constraints=({"distinctAttribute": UUID},))
    replica = serving(("n1", 64))
    put(replica, *(b.share(f"p{i}", 1 + i, annotations=record(str(i)), node="n1") for i in range(64)))
    assess(replica, raw, budgets)
    assert (budgets.remaining("default") < before) == is_charged


LOOP = f"[{','.join(map(str, range(90)))}]"
"""Kubernetes estimates the cost of two such loops in one another at 57,971 of 1,000,000 allowed."""


def selector(expression: str) -> Raw:
    return {"cel": {"expression": expression}}


def test_time_for_the_selectors_of_a_claim_is_limited() -> None:
    """41 KB of selectors took 25 s for each node, with the lock for all selectors held for seconds."""
    slow = [
        selector(f'{LOOP}.all(x, {LOOP}.all(y, x + y >= {-i} && device.attributes["gpu.mgpu.io"].uuid != ""))')
        for i in range(64)
    ]
    rows = [request(f"r{i}", cores=1, memory="1Mi", selectors=slow[i * 8 : i * 8 + 8]) for i in range(8)]
    replica = serving(("n1", 64))
    began = time.thread_time()
    rejection = assess(replica, claim("c", *rows))
    assert "mgpu does not evaluate all selectors of this claim" in str(rejection)
    assert time.thread_time() - began < 2.5


@pytest.mark.parametrize(
    "expression",
    [
        f'{LOOP}.all(x, {LOOP}.all(y, quantity("1").isLessThan(quantity("2"))))',
        '[1, 2].exists(x, isSemver //\n ("1.0.0"))',
    ],
)
def test_functions_that_leak_memory_are_not_called_in_loops(expression: str) -> None:
    """Each evaluation of the first one leaked 3.3 MiB, and the API server accepts 17 times as much."""
    found = Selectors().excluded([expression], [b.card()])
    assert isinstance(found, Unsupported)
    assert "beside a loop over a list" in found.reason


def test_calls_of_functions_that_leak_memory_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_selectors, "_MAX_CALLS", 12)
    selectors = Selectors()
    texts = [f'quantity("1").isLessThan(quantity("{i}"))' for i in range(2, 7)]
    found = [selectors.excluded([text], [b.card()]) for text in texts]
    assert [isinstance(one, Unsupported) for one in found] == [False] * 4 + [True]
    assert selectors.excluded(["device.allowMultipleAllocations"], [b.card()]) == {}
    assert selectors.excluded([texts[0]], [b.card()]) == {}


def test_names_of_functions_that_leak_memory_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(selector_functions, "_function", lambda name, *_, **__: names.append(name))
    selector_functions._functions()
    assert len(names) > 10
    assert all(claim_selectors._FUNCTION.fullmatch(name) for name in names)


class TestMemory:
    """The API server stores 1.5 MB for each object, and a tenant can create thousands of them."""

    def test_long_selectors_are_not_stored(self) -> None:
        replica = serving(("n1", 1))
        texts = [selector("true" + " " * 10_000) for _ in range(32)]
        submit(replica.api, claim("c", *(request(f"r{i}", cores=1, memory="1Mi", selectors=texts) for i in range(4))))
        replica.deliver()
        found = replica.state.claims.named("default", "c")
        assert found is not None
        assert sum(len(text) for one in found.requests for text in one.selectors) < 1000
        found = replace(found, requests=found.requests[:1])
        rejection = replica.claim_decider.assess(found, ["r0"], replica.state.node_snapshot("n1", found.uid))
        assert "selectors that are too long" in str(rejection)

    def test_few_claims_of_a_pod_are_stored(self) -> None:
        replica = serving(("n1", 1))
        put(replica, waiting_pod("p", *(f"c{i}" for i in range(5000))))
        assert [len(pod.claims) for pod in replica.state.claims.waiting_pods()] == [32]

    def test_few_templates_of_a_pod_are_stored(self) -> None:
        replica = serving(("n1", 1))
        raw = waiting_pod("p")
        names = [f"t{i}" for i in range(5000)] + [f"mgpu-{i:020x}" for i in range(5000)]
        raw["spec"]["resourceClaims"] = [{"name": name, "resourceClaimTemplateName": name} for name in names]
        put(replica, raw)
        found = replica.state.claims.referred_templates()
        assert found == {("default", f"mgpu-{i:020x}") for i in range(32)}

    @pytest.mark.parametrize(("size", "is_stored"), [(1_000, True), (100_000, False)])
    def test_long_annotation_of_a_converted_pod_is_not_stored(self, size: int, is_stored: bool) -> None:
        """A tenant can write it where the component for conversions, with its webhooks, is not installed."""
        original = {"c": {"limits": {"aliyun.com/gpu-mem": "1" * size}}}
        converted = ConvertedRequests((ConvertedRequest("c", 1, 30, 1 << 30),), {}, original)
        raw = waiting_pod("p")
        raw["spec"]["resourceClaims"] = [pod_claim(converted)]
        raw["metadata"]["annotations"] = {CONVERTED: converted.to_annotation()}
        replica = serving(("n1", 1))
        put(replica, raw)
        assert [pod.converted.original for pod in replica.state.claims.converted_pods()] == [{}] * is_stored


ALTERNATIVES = tuple(
    {"name": f"r{i}", "firstAvailable": [request(f"x{j}")["exactly"] | {"name": f"x{j}"} for j in range(8)]}
    for i in range(2)
)
"""Two requests with eight alternatives each."""


class TestInstanceFilter:
    """kube-scheduler schedules no other pod during a call. One for a pod of 32 claims took a minute for one node."""

    @pytest.fixture
    def replica(self) -> Replica:
        replica = serving(*((f"n{i}", 1) for i in range(20)))
        submit(replica.api, *(claim(f"c{i}", *ALTERNATIVES) for i in range(32)))
        replica.deliver()
        return replica

    @pytest.mark.parametrize("names", [["n0"], [f"n{i}" for i in range(20)]])
    def test_time_is_limited_for_claims_alternatives_and_nodes_together(
        self, replica: Replica, names: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 0.0
        examined = []

        def assess(*_: Any) -> Rejection:
            nonlocal now
            now += 0.02
            examined.append(now)
            return Rejection(RejectionKind.SLICES, "no room")

        monkeypatch.setattr(replica.claim_decider, "assess", assess)
        nodes = InstanceFilter(replica.state, replica.claim_decider, lambda: now)
        claims = [found for i in range(32) if (found := replica.state.claims.named("default", f"c{i}")) is not None]
        assert nodes.rejections(claims, names) == {}
        assert len(claims) == 32
        assert len(examined) <= 6

    def test_time_for_selectors_is_limited_for_all_claims_together(
        self, replica: Replica, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        patience = []
        monkeypatch.setattr(replica.claim_decider, "assess", lambda *given: patience.append(given[-1]))
        monkeypatch.setattr(replica.claim_decider, "cost_of_instances", lambda *_: 0)
        found = replica.state.claims.named("default", "c0")
        assert found is not None
        InstanceFilter(replica.state, replica.claim_decider).scores([found] * 3, ["n0", "n1"])
        assert len(patience) == 6
        assert [one.left for one in {*patience}] == [0.1]


class TestWaker:
    """Each examination takes 0.04 s here."""

    @pytest.fixture
    def replica(self, monkeypatch: pytest.MonkeyPatch) -> Replica:
        replica = serving(*((f"n{i}", 1) for i in range(20)))
        waker = replica.claim_waker
        self.examined: list[str] = []
        now = 0.0

        def assess(found: Any, *_: Any) -> Rejection:
            nonlocal now
            now += 0.04
            self.examined.append(found.key)
            return Rejection(RejectionKind.NOT_PROVEN, "takes long")

        monkeypatch.setattr(waker._decider, "assess", assess)
        monkeypatch.setattr(waker, "_cpu_clock", lambda: now)
        return replica

    def wait(self, replica: Replica, *pods: tuple[str, str], requests: tuple[Raw, ...] = ()) -> None:
        for namespace, name in pods:
            submit(replica.api, claim(name, *requests, namespace=namespace, uid=name))
            raw = waiting_pod(name, name)
            raw["metadata"]["namespace"] = namespace
            put(replica, raw)
        replica.claim_waker.work()
        replica.clock.now += 1

    def test_time_for_a_pod_and_for_a_round_is_limited(self, replica: Replica) -> None:
        self.wait(replica, *(("a", f"a{i}") for i in range(50)))
        replica.claim_waker.work()
        assert len(self.examined) == 9
        assert len(set(self.examined)) == 3

    def test_alternatives_do_not_multiply_the_time_for_a_node(self, replica: Replica) -> None:
        """A claim has up to 64 sets of alternatives, each of which took as long."""
        self.wait(replica, ("a", "a"), requests=ALTERNATIVES)
        replica.claim_waker.work()
        assert len(self.examined) == 3

    def test_namespaces_take_turns(self, replica: Replica) -> None:
        self.wait(replica, *(("a", f"a{i}") for i in range(50)), ("b", "b"))
        replica.claim_waker.work()
        assert "b/b" in self.examined
