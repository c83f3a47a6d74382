"""Which pods use which claims, and what their containers reference."""

from typing import Any

import pytest

from deviceplugin.dra.claim_users import ClaimUsers, Reference, read_claim_pod
from tests.builders import container, pod
from tests.deviceplugin.dra.claims import claim_pod, using


def test_pod_without_claims_is_ignored() -> None:
    assert read_claim_pod(pod("p", container("c", 10, 1024))) is None


def test_references_are_resolved_to_the_names_of_claims() -> None:
    raw = claim_pod("p", using("c", "mine"), using("d", "made/gpu"), using("plain"))
    raw["spec"]["resourceClaims"] = [
        {"name": "mine", "resourceClaimName": "shared"},
        {"name": "made", "resourceClaimTemplateName": "template"},
    ]
    raw["status"]["resourceClaimStatuses"] = [{"name": "made", "resourceClaimName": "p-made-x7"}]
    found = read_claim_pod(raw)
    assert found is not None
    assert found.claims == {"shared", "p-made-x7"}
    assert found.references == {"c": (Reference("shared", ""),), "d": (Reference("p-made-x7", "gpu"),)}


def test_claim_of_a_template_that_does_not_exist_yet_is_left_out() -> None:
    raw = claim_pod()
    raw["spec"]["resourceClaims"] = [{"name": "a", "resourceClaimTemplateName": "template"}]
    found = read_claim_pod(raw)
    assert found is not None
    assert (found.claims, found.references) == (frozenset(), {})


def test_claim_for_extended_resources_is_referenced_by_its_mappings() -> None:
    raw = pod("p", container("c"), container("d"))
    raw["status"]["extendedResourceClaimStatus"] = {
        "resourceClaimName": "p-extended-resources-x",
        "requestMappings": [
            {"containerName": "c", "resourceName": "nvidia.com/gpu", "requestName": "container-0-request-0"}
        ],
    }
    found = read_claim_pod(raw)
    assert found is not None
    assert found.claims == {"p-extended-resources-x"}
    assert found.references == {"c": (Reference("p-extended-resources-x", "container-0-request-0"),)}


def test_init_containers_count() -> None:
    raw = claim_pod()
    raw["spec"]["initContainers"] = [using("i", "a")]
    found = read_claim_pod(raw)
    assert found is not None
    assert {*found.references} == {"i", "c"}


def test_users_follow_the_watch() -> None:
    changes: list[int] = []
    users = ClaimUsers(lambda: changes.append(1))
    raw: dict[str, Any] = claim_pod()
    users.take(raw)
    users.take(raw)
    assert len(changes) == 1
    assert [found.name for found in users.users_of("default", "a")] == ["p"]
    assert users.users_of("other", "a") == ()
    users.drop(raw)
    assert users.users_of("default", "a") == ()
    assert len(changes) == 2


@pytest.mark.parametrize(
    ("claims", "containers", "is_stored"), [(64, 1, True), (65, 1, False), (64, 32, True), (64, 33, False)]
)
def test_pod_with_thousands_of_references_is_not_stored(claims: int, containers: int, is_stored: bool) -> None:
    """Such a pod took 3 MiB of the agent's memory, also after it had ended. It may name any node."""
    names = [f"c{i}" for i in range(claims)]
    raw = claim_pod("p", *(using(f"c{i}", *names) for i in range(containers)), claims=names)
    assert (read_claim_pod(raw) is not None) == is_stored
