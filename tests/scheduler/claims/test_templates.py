"""The controller creates the ResourceClaimTemplates of converted pods, and removes those that are not used."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.converted_requests import CONVERTED, claim_template, read_converted
from mgpu.model.errors import RetryLater
from mgpu.settings import load_settings
from scheduler.claims.templates import LIST_SECONDS, RETRY_SECONDS, UNUSED_SECONDS, ClaimTemplates
from scheduler.cluster.cache import ClusterCache
from tests.builders import share
from tests.clock import Clock
from tests.mgpu.serving.reviews import patched
from webhook.pod_conversion import convert

Raw = dict[str, Any]
SETTINGS = load_settings("dra: {enabled: true, convert: true}")


class FakeApi:
    """Stores templates as the API server does. before_delete: called once, before the next deletion."""

    def __init__(self) -> None:
        self.templates: dict[str, Raw] = {}
        self.creates = 0
        self.broken: Exception | None = None
        self.before_delete: Callable[[], object] | None = None

    def create(self, path: str, body: Raw) -> Raw:
        self.creates += 1
        self._reach()
        where = f"{path}/{body['metadata']['name']}"
        if where in self.templates:
            raise ApiError(409, "AlreadyExists", where)
        stored = copy.deepcopy(body)
        stored["metadata"]["uid"] = f"uid-{self.creates}"
        self.templates[where] = stored
        return stored

    def get(self, path: str) -> Raw:
        self._reach()
        if path not in self.templates:
            raise ApiError(404, "NotFound", path)
        return copy.deepcopy(self.templates[path])

    def list(self, path: str, labelSelector: str) -> tuple[list[Raw], str]:  # noqa: N803
        self._reach()
        assert path == "/apis/resource.k8s.io/v1/resourceclaimtemplates"
        key, _, value = labelSelector.partition("=")
        found = [t for t in self.templates.values() if t["metadata"].get("labels", {}).get(key) == value]
        return copy.deepcopy(found), "1"

    def delete(self, path: str, options: Raw) -> Raw:
        if self.before_delete:
            self.before_delete()
            self.before_delete = None
        self._reach()
        if self.templates[path]["metadata"]["uid"] != options["preconditions"]["uid"]:
            raise ApiError(409, "Conflict", path)
        return self.templates.pop(path)

    def _reach(self) -> None:
        if self.broken:
            raise self.broken


class Rig:
    """A cluster cache with the controller, and what the controller has warned of."""

    def __init__(self) -> None:
        self.state = ClusterCache(SETTINGS)
        self.api = FakeApi()
        self.clock = Clock()
        self.warnings: list[tuple[str, str]] = []
        self.leads = True
        self.controller = ClaimTemplates(
            self.state, cast(Api, self.api), self._warn, self._may_decide, clock=self.clock
        )

    def _warn(self, regarding: Raw, reason: str, message: str) -> None:
        assert message
        self.warnings.append((regarding["name"], reason))

    def _may_decide(self) -> None:
        if not self.leads:
            raise RetryLater("another replica leads")

    def work(self, after: float = 0.0) -> None:
        self.clock.now += after
        self.controller.work()

    def names(self) -> list[tuple[str, str]]:
        return [(t["metadata"]["namespace"], t["metadata"]["name"]) for t in self.api.templates.values()]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def converted(name: str = "p", core: int = 50, **more: Any) -> Raw:
    raw = share(name, core, **more)
    return patched(raw, convert(raw, SETTINGS).patch)


def template_of(raw: Raw) -> Raw:
    return claim_template(read_converted(raw["metadata"]["annotations"][CONVERTED]), raw["metadata"]["namespace"])


def with_claim(raw: Raw) -> Raw:
    status = {**raw["status"], "resourceClaimStatuses": [{"name": "mgpu", "resourceClaimName": "p-mgpu-1"}]}
    return {**raw, "status": status}


def test_converted_pod_without_claim_gets_its_template(rig: Rig) -> None:
    raw = converted()
    rig.state.pod_changed(raw)
    rig.work()
    (stored,) = rig.api.templates.values()
    del stored["metadata"]["uid"]
    assert stored == template_of(raw)
    assert stored["metadata"]["name"] == raw["spec"]["resourceClaims"][0]["resourceClaimTemplateName"]
    assert rig.warnings == []


@pytest.mark.parametrize(
    "raw",
    [
        share(),
        with_claim(converted()),
        converted(phase="Succeeded"),
        {**converted(), "metadata": {**converted()["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}},
        {**converted(), "metadata": {**converted()["metadata"], "annotations": {CONVERTED: "{}"}}},
        {**converted(), "metadata": {**converted()["metadata"], "annotations": {}}},
        {**converted(), "spec": converted("q", 30)["spec"]},
    ],
    ids=["classic", "has a claim", "ended", "deleted", "unreadable", "without annotation", "another template"],
)
def test_other_pods_get_no_template(rig: Rig, raw: Raw) -> None:
    rig.state.pod_changed(raw)
    rig.work()
    assert rig.api.creates == 0


def test_pods_with_equal_requests_share_a_template_within_a_namespace(rig: Rig) -> None:
    for raw in (converted("a"), converted("b"), converted("c", namespace="other"), converted("d", 30)):
        rig.state.pod_changed(raw)
    rig.work()
    rig.work(0.2)
    assert [namespace for namespace, _ in sorted(rig.names())] == ["default", "default", "other"]
    assert rig.api.creates == 3


def test_template_that_exists_with_equal_content_is_used(rig: Rig) -> None:
    raw = converted()
    stored = template_of(raw)
    amounts = stored["spec"]["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"]
    amounts["memory"] = "1024Mi"
    stored["spec"]["metadata"] = {"creationTimestamp": None}
    rig.api.create("/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates", stored)
    rig.state.pod_changed(raw)
    rig.work()
    assert rig.warnings == []


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec["spec"]["devices"]["requests"][0]["exactly"].update(count=2),
        lambda spec: spec["spec"]["devices"]["requests"][0]["exactly"].pop("capacity"),
        lambda spec: spec["spec"]["devices"]["requests"][0]["exactly"].update(deviceClassName="other"),
        lambda spec: spec["spec"]["devices"]["requests"][0]["exactly"].update(adminAccess=True),
        lambda spec: spec["spec"]["devices"].update(config=[{}]),
        lambda spec: spec["metadata"]["annotations"].update({"mgpu.io/card-models": "H100"}),
    ],
)
def test_template_with_another_content_is_reported_and_not_replaced(rig: Rig, change: Callable[[Raw], object]) -> None:
    raw = converted()
    stored = template_of(raw)
    change(stored["spec"])
    rig.api.create("/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates", stored)
    before = copy.deepcopy(rig.api.templates)
    rig.state.pod_changed(raw)
    rig.work()
    assert rig.warnings == [("p", "MgpuTemplateConflict")]
    assert rig.api.templates == before


def test_create_that_fails_is_reported_and_repeated(rig: Rig) -> None:
    rig.state.pod_changed(converted())
    rig.api.broken = ApiError(403, "Forbidden", "exceeded quota")
    rig.work()
    rig.work(0.2)
    assert rig.warnings == [("p", "MgpuTemplateFailed")]
    rig.api.broken = Unreachable("down")
    rig.work(RETRY_SECONDS)
    rig.api.broken = None
    rig.work(RETRY_SECONDS)
    assert len(rig.api.templates) == 1
    assert len(rig.warnings) == 1


class TestManyTemplates:
    """A quota on claims or templates lets the pods of a tenant wait for ever, each with a template of its own."""

    @pytest.fixture(autouse=True)
    def many(self, rig: Rig) -> None:
        for i in range(100):
            rig.state.pod_changed(converted(f"p{i}", 1 + i))

    def test_round_creates_some_of_them(self, rig: Rig) -> None:
        rig.work()
        assert rig.api.creates == 20

    def test_new_template_of_another_namespace_is_created_in_the_next_round(self, rig: Rig) -> None:
        rig.work()
        rig.state.pod_changed(converted("q", 50, namespace="z"))
        rig.work(0.2)
        assert "z" in {namespace for namespace, _ in rig.names()}

    def test_pauses_grow(self, rig: Rig) -> None:
        rig.api.broken = ApiError(403, "Forbidden", "exceeded quota")
        for _ in range(600):
            rig.work(1)
        assert rig.api.creates < 100 * 15


def test_template_that_somebody_deletes_while_a_pod_waits_is_created_again(rig: Rig) -> None:
    rig.state.pod_changed(converted())
    rig.work()
    rig.api.templates.clear()
    rig.work(RETRY_SECONDS)
    assert len(rig.api.templates) == 1


def test_replica_that_does_not_lead_writes_nothing(rig: Rig) -> None:
    rig.leads = False
    rig.state.pod_changed(converted())
    rig.work()
    assert rig.api.creates == 0


def test_template_is_removed_after_no_pod_has_referred_to_it_for_ten_minutes(rig: Rig) -> None:
    raw = converted()
    rig.state.pod_changed(raw)
    rig.work()
    rig.state.pod_changed(with_claim(raw))
    rig.work(UNUSED_SECONDS)
    rig.work(UNUSED_SECONDS)
    rig.state.pod_gone(raw)
    rig.work(LIST_SECONDS)
    rig.work(UNUSED_SECONDS - 1)
    assert len(rig.api.templates) == 1
    rig.work(LIST_SECONDS)
    assert rig.api.templates == {}


def test_template_that_is_used_again_starts_a_new_period(rig: Rig) -> None:
    raw = converted()
    rig.state.pod_changed(raw)
    rig.work()
    rig.state.pod_gone(raw)
    rig.work(LIST_SECONDS)
    rig.state.pod_changed(with_claim(converted("q")))
    rig.work(LIST_SECONDS)
    rig.state.pod_gone(converted("q"))
    rig.work(UNUSED_SECONDS)
    assert len(rig.api.templates) == 1


def test_template_that_is_removed_while_a_pod_is_created_is_created_again(rig: Rig) -> None:
    raw = converted()
    rig.state.pod_changed(raw)
    rig.work()
    rig.state.pod_gone(raw)
    rig.work(LIST_SECONDS)
    rig.api.before_delete = lambda: rig.state.pod_changed(converted("new"))
    rig.work(UNUSED_SECONDS)
    assert rig.api.templates == {}
    rig.work(0.2)
    assert len(rig.api.templates) == 1


def test_templates_of_users_are_never_removed(rig: Rig) -> None:
    path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
    for name, labels in (("mgpu-share", {"mgpu.io/generated": "true"}), ("mgpu-" + "0" * 20, {})):
        meta = {"name": name, "namespace": "default", "labels": labels}
        rig.api.create(path, {"metadata": meta, "spec": {}})
    rig.work()
    rig.work(UNUSED_SECONDS)
    rig.work(UNUSED_SECONDS)
    assert len(rig.api.templates) == 2


def test_new_leader_waits_for_ten_minutes_itself(rig: Rig) -> None:
    raw = converted()
    rig.state.pod_changed(raw)
    rig.work()
    rig.state.pod_gone(raw)
    rig.work(LIST_SECONDS)
    rig.leads = False
    rig.work(LIST_SECONDS)
    rig.leads = True
    rig.work(UNUSED_SECONDS)
    assert len(rig.api.templates) == 1
