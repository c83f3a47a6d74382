"""Records are found by the UID of their claim, and by the name by which pods refer to it."""

from pathlib import Path

import pytest

from tests.deviceplugin.dra.claims import claim, claim_pod, uid_of
from tests.deviceplugin.dra.rig import ClaimNode


@pytest.fixture
def node(folder: Path) -> ClaimNode:
    node = ClaimNode(folder)
    node.api.put(claim())
    node.take(claim_pod())
    node.prepare()
    return node


def found(node: ClaimNode) -> str | None:
    record = node.claims.named("default", "a")
    return record.uid if record is not None else None


def test_record_is_found_by_name_until_it_is_removed(node: ClaimNode) -> None:
    assert found(node) == uid_of("a")
    assert node.claims.named("other", "a") is None
    node.claims.remove(uid_of("a"))
    assert found(node) is None


def test_record_is_found_by_name_after_a_restart(node: ClaimNode) -> None:
    node.restart()
    assert found(node) == uid_of("a")


def test_latest_claim_of_a_name_is_found(node: ClaimNode) -> None:
    """The record of the former one stays if the kubelet does not have it unprepared."""
    again = claim(cards=[1])
    again["metadata"]["uid"] = uid_of("again")
    node.api.put(again)
    node.prepare(uid=uid_of("again"))
    assert found(node) == uid_of("again")
    node.claims.remove(uid_of("again"))
    assert found(node) == uid_of("a")
