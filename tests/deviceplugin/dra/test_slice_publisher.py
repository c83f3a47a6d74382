"""When the ResourceSlice is written, and what is reported if it cannot be."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from deviceplugin.dra.slice_content import desired_slice, difference, lost_fields, published_cards
from deviceplugin.dra.slice_publisher import SlicePublisher
from mgpu.kube import Api, ApiError
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding, Share
from mgpu.model.resource_claims import DRIVER, SLICES
from mgpu.model.resource_slices import WAKE, PublishedCard, slice_name
from playground.apiserver import ApiServer, User, running
from tests.builders import GIB, card, cards
from tests.builders import node as make_node
from tests.deviceplugin.node import api_of
from tests.waiting import until

Json = dict[str, Any]
PATH = f"{SLICES}/{slice_name('n1')}"


@pytest.fixture
def api() -> Iterator[Api]:
    with running(ApiServer(tokens={"admin": User("admin", ("system:masters",))})) as url:
        found = api_of(url)
        yield found
        found.close()


class Source:
    """What the agent knows of its cards."""

    def __init__(self) -> None:
        self.free = 1000
        self.is_known = True
        self.warnings: list[str] = []

    def cards(self) -> tuple[PublishedCard, ...]:
        if not self.is_known:
            raise RetryLater("the cards have not been read yet")
        return tuple(PublishedCard(one, self.free, one.memory) for one in cards(2))


@contextmanager
def publishing(api: Api, source: Source, **more: Any) -> Iterator[SlicePublisher]:
    publisher = SlicePublisher(api, "n1", source.cards, lambda: "uid-n1", source.warnings.append, **more)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.stop()


def cores(api: Api) -> str:
    value: str = api.get(PATH)["spec"]["devices"][0]["capacity"]["cores"]["value"]
    return value


def test_many_changes_are_written_together(api: Api) -> None:
    source = Source()
    with publishing(api, source) as publisher:
        until(lambda: publisher.published)
        before = publisher.writes
        began = time.monotonic()
        for free in range(990, 490, -10):
            source.free = free
            publisher.update()
            cores(api)  # a call that takes some time
        until(lambda: cores(api) == "50")
        assert publisher.writes - before <= 2 * (time.monotonic() - began) + 1


def test_last_change_is_never_lost(api: Api) -> None:
    source = Source()
    with publishing(api, source, collect_seconds=0.0, least_interval=0.0) as publisher:
        until(lambda: publisher.published)
        for free in range(100, 900, 100):
            source.free = free
            publisher.update()
        until(lambda: cores(api) == "80")


def test_equal_content_is_not_written(api: Api) -> None:
    source = Source()
    with publishing(api, source) as publisher:
        until(lambda: publisher.published)
        for _ in range(3):
            assert publisher._try().problem is None
        assert publisher.writes == 1


def test_next_agent_continues_with_the_slice(api: Api) -> None:
    with publishing(api, Source()) as first:
        until(lambda: first.published)
    api.patch(PATH, {"metadata": {"annotations": {WAKE: "1"}}})
    with publishing(api, Source()) as second:
        until(lambda: second.published)
        assert second.writes == 0
    assert api.get(PATH)["metadata"]["annotations"] == {WAKE: "1"}


def test_write_of_another_client_is_corrected(api: Api) -> None:
    with publishing(api, Source()) as publisher:
        until(lambda: publisher.published)
        raw = api.get(PATH)
        raw["spec"]["devices"] = raw["spec"]["devices"][:1]
        api.replace(PATH, raw)
        until(lambda: len(api.get(PATH)["spec"]["devices"]) == 2)


def test_other_slices_of_the_driver_are_removed(api: Api) -> None:
    """Two slices of a pool with one slice would make kube-scheduler ignore the pool."""
    made = desired_slice("n1", "uid-n1", Source().cards(), None)
    made["metadata"]["name"] = "left-over"
    api.create(SLICES, made)
    other = {**made, "metadata": {**made["metadata"], "name": "of-nics"}, "spec": {**made["spec"], "driver": "nic.io"}}
    api.create(SLICES, other)
    with publishing(api, Source()) as publisher:
        until(lambda: publisher.published)
        names = {raw["metadata"]["name"] for raw in api.list(SLICES)[0]}
        assert names == {slice_name("n1"), "of-nics"}


def test_slice_waits_until_the_cards_are_known(api: Api) -> None:
    source = Source()
    source.is_known = False
    with publishing(api, source) as publisher:
        until(lambda: publisher.problem == "the cards have not been read yet")
        assert api.list(SLICES)[0] == []
        source.is_known = True
        publisher.update()
        until(lambda: publisher.published)
    assert source.warnings == []


class Changed(Api):
    """An API server that answers some calls in another way."""

    def __init__(
        self, api: Api, answer: Callable[[str, Json], Json], *, is_missing: bool = False, version: str = ""
    ) -> None:
        self._api = api
        self._answer = answer
        self._is_missing = is_missing
        self._version = version

    def __getattribute__(self, name: str) -> Any:
        own = ("_api", "_answer", "_is_missing", "_version", "get", "create", "replace", "_check")
        return object.__getattribute__(self, name) if name in own else getattr(self._api, name)

    def get(self, path: str, **query: object) -> Json:
        if path == "/version" and self._version == "403":
            raise ApiError(403, "Forbidden", path)
        return {"gitVersion": self._version} if path == "/version" else self._api.get(path, **query)

    def create(self, path: str, body: Mapping[str, Any], **query: object) -> Json:
        self._check(path)
        return self._answer(str(query.get("dryRun", "")), self._api.create(path, body, **query))

    def replace(self, path: str, body: Mapping[str, Any], **query: object) -> Json:
        self._check(path)
        return self._answer(str(query.get("dryRun", "")), self._api.replace(path, body, **query))

    def _check(self, path: str) -> None:
        if self._is_missing:
            raise ApiError(404, "NotFound", path)


def without_sharing(_: str, raw: Json) -> Json:
    rows = [{k: v for k, v in row.items() if k != "allowMultipleAllocations"} for row in raw["spec"]["devices"]]
    return {**raw, "spec": {**raw["spec"], "devices": rows}}


def test_disabled_feature_gate_is_reported_and_nothing_is_published(api: Api) -> None:
    source = Source()
    with publishing(Changed(api, without_sharing), source) as publisher:
        until(lambda: source.warnings)
        assert "drops allowMultipleAllocations" in source.warnings[0]
        assert "DRAConsumableCapacity" in source.warnings[0]
        assert api.list(SLICES)[0] == []
        assert not publisher.published
        publisher.update()
        assert publisher._try().problem == source.warnings[0]
        assert len(source.warnings) == 1


def test_nothing_is_published_on_a_version_whose_kube_scheduler_ends_at_claims(api: Api) -> None:
    source = Source()
    with publishing(Changed(api, lambda _, raw: raw, version="v1.34.13-gke.1"), source) as publisher:
        until(lambda: source.warnings)
        assert "Kubernetes 1.35 or newer" in source.warnings[0]
        assert "1.34" in source.warnings[0]
        assert api.list(SLICES)[0] == []
        assert not publisher.published


@pytest.mark.parametrize("version", ["v1.35.0", "v1.36.2+k3s1", "v2.0.0", "?", "403"])
def test_other_and_unknown_versions_are_served(version: str, api: Api) -> None:
    with publishing(Changed(api, lambda _, raw: raw, version=version), Source()) as publisher:
        until(lambda: publisher.published)


def test_missing_api_is_reported(api: Api) -> None:
    source = Source()
    with publishing(Changed(api, lambda _, raw: raw, is_missing=True), source) as publisher:
        until(lambda: source.warnings)
        assert "does not serve resource.k8s.io/v1" in source.warnings[0]
        assert publisher.problem == source.warnings[0]


# The content


def test_capacity_is_what_pods_leave_free() -> None:
    held = [Holding("u", "default", "p", "n1", "mgpu", (Share("c", 0, 300, 10 * GIB),))]
    first, second = published_cards(cards(2), cards(2), cards(2), held)
    assert (first.core_free, first.memory_free) == (700, 70 * GIB)
    assert (second.core_free, second.memory_free) == (1000, 80 * GIB)


def test_holdings_of_any_source_count() -> None:
    """Unrecorded pods and remnants have no node in their holding."""
    held = [Holding("u", "", "", "", "", (Share("c", "GPU-n1-0", whole=True),))]
    first, _ = published_cards(cards(2), cards(2), cards(2), held)
    assert (first.core_free, first.memory_free) == (0, 0)


def test_partitioned_card_offers_nothing() -> None:
    first, second = published_cards(cards(2), cards(2)[1:], cards(2), [])
    assert (first.core_free, first.memory_free, [t.key for t in first.taints]) == (0, 0, ["mgpu.io/partitioned"])
    assert second.taints == ()


def test_other_forms_of_quantities_and_times_of_taints_are_no_difference() -> None:
    unhealthy = published_cards([card(0, healthy=False)], cards(1), cards(1), [])
    desired = desired_slice("n1", "uid-n1", unhealthy, None)
    stored = desired_slice("n1", "uid-n1", unhealthy, None)
    (device,) = stored["spec"]["devices"]
    device["taints"][0]["timeAdded"] = "2026-01-01T00:00:00Z"
    device["capacity"]["memory"]["value"] = str(80 * GIB)
    assert difference(stored, desired) is None
    again = desired_slice("n1", "uid-n1", unhealthy, stored)
    assert again["spec"]["devices"][0]["taints"][0]["timeAdded"] == "2026-01-01T00:00:00Z"


def test_lost_fields_are_named() -> None:
    desired = desired_slice("n1", "uid-n1", published_cards([card(0, healthy=False)], cards(1), cards(1), []), None)
    (device,) = desired["spec"]["devices"]
    bare = {"name": "card-0", "capacity": {name: {"value": "1"} for name in device["capacity"]}}
    stored = {**desired, "spec": {**desired["spec"], "devices": [bare]}}
    assert lost_fields(stored, desired) == ("allowMultipleAllocations", "requestPolicy", "taints")


def test_owner_is_the_node() -> None:
    raw = make_node()
    made = desired_slice("n1", raw["metadata"]["uid"], Source().cards(), None)
    assert made["metadata"]["ownerReferences"][0]["uid"] == "uid-n1"
    assert made["spec"]["driver"] == DRIVER
