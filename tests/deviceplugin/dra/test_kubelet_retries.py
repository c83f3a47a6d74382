"""When the agent makes the kubelet try a pod again for which it has not called."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.dra.kubelet_retries import FIRST_PAUSE, LONGEST_PAUSE, RETRY, KubeletRetries
from mgpu.kube import ApiError
from tests.deviceplugin.dra.claims import claim, claim_pod, uid_of
from tests.deviceplugin.dra.rig import ClaimNode, FakeClaims

Json = dict[str, Any]
PATCHED = "/api/v1/namespaces/default/pods/p"


class FakeApi(FakeClaims):
    """An API server that also accepts annotations of pods. Those that were written are `patches`, by path."""

    def __init__(self) -> None:
        super().__init__()
        self.patches: list[tuple[str, Json]] = []

    def patch(self, path: str, body: object, content_type: str = "", **query: object) -> Json:  # noqa: ARG002
        if self.failing:
            raise ApiError(self.failing, "Failing", "on purpose")
        assert isinstance(body, Mapping)
        self.patches.append((path, body["metadata"]))
        return {}


class Site:
    """A node with a clock. Pod `p` is on it and waits for claim `a`, for which the kubelet has not called."""

    def __init__(self, folder: Path) -> None:
        self.node = ClaimNode(folder)
        self.api = FakeApi()
        self.node.api = self.api
        self.node.restart()
        self.now = 0.0
        self.registered = True
        self.api.put(claim())
        self.node.take(claim_pod())
        node = self.node
        self.retries = KubeletRetries(
            self.api, "n1", node.claims, node.users, lambda: self.registered, clock=lambda: self.now
        )

    def pass_time(self, seconds: float) -> int:
        """Let time pass in rounds of half a second, and return how many annotations were written meanwhile."""
        before = len(self.api.patches)
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            asyncio.run(self.retries.work())
        return len(self.api.patches) - before


@pytest.fixture
def site(folder: Path) -> Site:
    found = Site(folder)
    asyncio.run(found.retries.work())
    return found


def test_pod_that_waits_gets_another_value_of_the_annotation(site: Site) -> None:
    assert site.pass_time(FIRST_PAUSE - 0.5) == 0, "the kubelet gets the time to call"
    assert site.pass_time(0.5) == 1
    ((path, meta),) = site.api.patches
    assert (path, meta["uid"], {*meta["annotations"]}) == (PATCHED, "uid-p", {RETRY})


def test_pauses_grow_up_to_a_limit(site: Site) -> None:
    assert site.pass_time(FIRST_PAUSE * 15) == 4
    assert site.pass_time(10 * LONGEST_PAUSE) in (10, 11)


def test_prepared_claim_is_left_alone(site: Site) -> None:
    site.node.prepare()
    assert site.pass_time(60) == 0


def test_call_in_progress_is_left_alone(site: Site) -> None:
    with site.node.claims.preparing(uid_of("a")):
        assert site.pass_time(60) == 0
    assert site.pass_time(LONGEST_PAUSE) == 1, "the kubelet repeats a failed call only much later"


def test_of_several_claims_one_is_missing(site: Site) -> None:
    site.node.prepare()
    site.api.put(claim("b"))
    site.node.take(claim_pod(claims=("a", "b")))
    assert site.pass_time(FIRST_PAUSE + 0.5) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw["status"].update(phase="Running"),
        lambda raw: raw["status"].update(phase="Failed"),
        lambda raw: raw["metadata"].update(deletionTimestamp="2026-11-24T00:00:00Z"),
        lambda raw: raw["spec"].update(resourceClaims=[]),
    ],
)
def test_pod_that_does_not_wait_is_left_alone(site: Site, change: Any) -> None:
    raw = claim_pod()
    change(raw)
    site.node.take(raw)
    assert site.pass_time(60) == 0


@pytest.mark.parametrize(
    "raw",
    [
        claim() | {"status": {}},
        claim(pods=("another",)),
        claim(node="n2"),
    ],
)
def test_claim_that_the_pod_may_not_have_here_is_left_alone(site: Site, raw: Json) -> None:
    site.api.put(raw)
    assert site.pass_time(60) == 0


def test_invalid_annotation_of_the_claim_does_not_matter(site: Site) -> None:
    site.api.put(claim(annotations={"mgpu.io/card-uuids": "-", "mgpu.io/card-policy": "?"}))
    assert site.pass_time(FIRST_PAUSE) == 1


def test_driver_that_is_not_registered_cannot_be_called(site: Site) -> None:
    site.registered = False
    assert site.pass_time(60) == 0
    site.registered = True
    assert site.pass_time(FIRST_PAUSE) == 0, "the kubelet has just learned of the driver"
    assert site.pass_time(0.5) == 1


@pytest.mark.parametrize("status", [403, 404, 409, 500])
def test_error_of_the_api_server_is_retried(site: Site, status: int) -> None:
    site.api.failing = status
    assert site.pass_time(10) == 0
    site.api.failing = 0
    assert site.pass_time(LONGEST_PAUSE) >= 1
