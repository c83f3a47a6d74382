"""The DRA manager without gRPC: batches, partial failures, and what it writes down before it calls a driver."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from playground.kubelet import claim_checkpoint
from playground.kubelet.claim_manager import ClaimManager
from playground.kubelet.pod_claims import ClaimError
from proto import dra_pb2 as api

Json = dict[str, Any]


class FakeDriver:
    """Prepares the device card-0 for each claim. `refused` has the claims that fail, `skipped` those without answer."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.refused: set[str] = set()
        self.skipped: set[str] = set()

    def prepare(self, claims: Sequence[api.Claim]) -> Mapping[str, api.NodePrepareResourceResponse]:
        self.calls.append([claim.name for claim in claims])
        device = api.Device(pool_name="n1", device_name="card-0", cdi_device_ids=["v/c=card-0"])
        return {
            claim.uid: api.NodePrepareResourceResponse(
                error="no" if claim.name in self.refused else "", devices=[device]
            )
            for claim in claims
            if claim.name not in self.skipped
        }

    def unprepare(self, claims: Sequence[api.Claim]) -> Mapping[str, api.NodeUnprepareResourceResponse]:
        self.calls.append([f"-{claim.name}" for claim in claims])
        return {
            claim.uid: api.NodeUnprepareResourceResponse(error="no" if claim.name in self.refused else "")
            for claim in claims
        }


class Rig:
    """A manager with two drivers. `claims` is what the API server has."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / claim_checkpoint.FILE
        self.drivers = {"one": FakeDriver(), "two": FakeDriver()}
        self.claims: dict[str, Json] = {}
        self.restart()

    def restart(self) -> None:
        self.manager = ClaimManager(self.file, lambda _, name: self.claims[name], self.drivers.__getitem__)

    def claim(self, name: str, *drivers: str, uid: str = "") -> None:
        """Add a claim that is reserved for the pods p and q."""
        results = [{"request": "r", "driver": driver, "pool": "n1", "device": "card-0"} for driver in drivers]
        self.claims[name] = {
            "metadata": {"name": name, "namespace": "default", "uid": uid or f"uid-{name}"},
            "status": {
                "allocation": {"devices": {"results": results}},
                "reservedFor": [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"} for pod in "pq"],
            },
        }

    def recorded(self) -> dict[str, tuple[str, ...]]:
        """Return the claims in the checkpoint with the UIDs of their pods."""
        return {state.name: tuple(sorted(state.pods)) for state in claim_checkpoint.read(self.file)}


def _pod(name: str, *claims: str) -> Json:
    entries = [{"name": claim, "resourceClaimName": claim} for claim in claims]
    containers = [{"name": "c", "resources": {"claims": [{"name": claim} for claim in claims]}}]
    meta = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
    return {"metadata": meta, "spec": {"resourceClaims": entries, "containers": containers}}


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_claims_of_a_pod_are_prepared_in_one_call_for_each_driver(rig: Rig) -> None:
    rig.claim("a", "one", "two")
    rig.claim("b", "one")
    pod = _pod("p", "a", "b")
    rig.manager.prepare(pod)
    assert rig.drivers["one"].calls == [["a", "b"]]
    assert rig.drivers["two"].calls == [["a"]]
    assert rig.manager.cdi_devices(pod, pod["spec"]["containers"][0]) == ("v/c=card-0",) * 3
    rig.manager.unprepare(pod)
    assert rig.drivers["one"].calls[1:] == [["-a", "-b"]]
    assert rig.recorded() == {}


def test_pod_is_recorded_before_the_driver_is_called(rig: Rig) -> None:
    rig.claim("a", "one")
    rig.drivers["one"].refused = {"a"}
    with pytest.raises(ClaimError, match="NodePrepareResources failed for ResourceClaim a: no"):
        rig.manager.prepare(_pod("p", "a"))
    assert rig.recorded() == {"a": ("uid-p",)}
    assert rig.manager.uses("uid-p")


def test_claim_that_the_driver_skips_is_an_error(rig: Rig) -> None:
    rig.claim("a", "one")
    rig.drivers["one"].skipped = {"a"}
    with pytest.raises(ClaimError, match="NodePrepareResources skipped 1 ResourceClaims"):
        rig.manager.prepare(_pod("p", "a"))


def test_repeated_preparation_repeats_the_devices(rig: Rig) -> None:
    """One claim fails, so that the kubelet calls again for both; it keeps both answers for the other one."""
    rig.claim("a", "one")
    rig.claim("b", "one")
    rig.drivers["one"].refused = {"b"}
    pod = _pod("p", "a", "b")
    with pytest.raises(ClaimError):
        rig.manager.prepare(pod)
    rig.drivers["one"].refused = set()
    rig.manager.prepare(pod)
    assert rig.drivers["one"].calls == [["a", "b"], ["a", "b"]]
    state = rig.manager.state("default", "a")
    assert state is not None
    assert len(state.drivers["one"]) == 2


def test_new_pod_of_a_shared_claim_prepares_it_again_after_a_restart(rig: Rig) -> None:
    rig.claim("a", "one")
    rig.manager.prepare(_pod("p", "a"))
    rig.manager.prepare(_pod("p", "a"))
    rig.restart()
    rig.manager.prepare(_pod("q", "a"))
    assert rig.drivers["one"].calls == [["a"], ["a"]]


def test_claim_that_is_not_allocated_is_an_error(rig: Rig) -> None:
    rig.claim("a", "one")
    del rig.claims["a"]["status"]["allocation"]
    with pytest.raises(ClaimError, match="prepare dynamic resources: ResourceClaim a: not allocated"):
        rig.manager.prepare(_pod("p", "a"))
    assert not rig.manager.uses("uid-p")


def test_new_claim_with_the_name_of_one_in_use_is_an_error(rig: Rig) -> None:
    rig.claim("a", "one")
    rig.manager.prepare(_pod("p", "a"))
    rig.claim("a", "one", uid="other")
    with pytest.raises(ClaimError, match="different UID uid-a still exists"):
        rig.manager.prepare(_pod("q", "a"))


def test_claims_of_inactive_pods_are_released(rig: Rig) -> None:
    rig.claim("a", "one")
    rig.claim("b", "one")
    rig.manager.prepare(_pod("p", "a", "b"))
    rig.manager.prepare(_pod("q", "b"))
    rig.drivers["one"].refused = {"a"}
    errors = rig.manager.release_inactive({"uid-q"})
    assert [str(error) for error in errors] == ["NodeUnprepareResources failed for ResourceClaim a: no"]
    rig.drivers["one"].refused = set()
    assert rig.manager.release_inactive({"uid-q"}) == []
    assert rig.recorded() == {"b": ("uid-q",)}


def test_corrupt_checkpoint_is_refused(rig: Rig) -> None:
    rig.claim("a", "one")
    rig.manager.prepare(_pod("p", "a"))
    rig.file.write_text(rig.file.read_text().replace("uid-p", "uid-x"))
    with pytest.raises(ValueError, match="corrupt"):
        rig.restart()
