"""docs/security.md says what each stolen token can do, and the roles in manifests agree."""

import pytest
import yaml

from tests.manifests import stolen_tokens
from tests.manifests.rendered import MANIFESTS
from tests.manifests.stolen_tokens import (
    BASE,
    COMPONENT,
    CONSEQUENCES,
    KUBERNETES_ROLES,
    PAGE,
    STARTS,
    Right,
    key_of,
    page,
    rights,
    table,
)

ALL = [right for file in STARTS for right in rights(file)]
WITH_BINDINGS = sorted(
    path
    for path in MANIFESTS.rglob("*.yaml")
    # test_chart.py compares the objects of the chart with these.
    if "RoleBinding" in path.read_text() and not path.is_relative_to(MANIFESTS / "chart")
)


def test_the_page_has_the_tables_of_the_roles() -> None:
    """`python -m tests.manifests.stolen_tokens` writes them."""
    assert PAGE.read_text() == page()


def test_every_file_with_role_bindings_has_a_table() -> None:
    bound = [path for path in WITH_BINDINGS if any(map(_is_binding, yaml.load_all(path.read_text(), yaml.CSafeLoader)))]
    assert {str(path.relative_to(MANIFESTS.parent)) for path in bound} == set(STARTS)


def _is_binding(document: object) -> bool:
    return isinstance(document, dict) and str(document.get("kind")).endswith("RoleBinding")


def test_every_consequence_is_of_a_right_that_is_given() -> None:
    assert {key_of(right) for right in ALL if right.role not in KUBERNETES_ROLES} == set(CONSEQUENCES)
    assert {right.role for right in ALL} >= set(KUBERNETES_ROLES)


def test_mgpus_own_accounts_have_no_role_of_kubernetes() -> None:
    """A stolen token of mgpu's process with `system:volume-scheduler` gave any tenant's volume to another claim."""
    assert {right.account for right in ALL if right.role in KUBERNETES_ROLES} == {"mgpu-kube-scheduler"}
    assert {right.account for right in rights(COMPONENT)} == {"mgpu-kube-scheduler", "mgpu-scheduler"}
    (only,) = (right for right in rights(COMPONENT) if right.account == "mgpu-scheduler")
    assert (only.resource, only.names, only.verbs) == ("leases", ("mgpu-kube-scheduler",), ("get",))


@pytest.mark.parametrize("file", [BASE, COMPONENT])
def test_a_right_of_which_no_consequence_is_known_is_found(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    more = [*rights(file), Right("mgpu-scheduler", "r", None, "secrets", (), ("create",))]
    monkeypatch.setattr(stolen_tokens, "rights", lambda _: iter(more))
    with pytest.raises(KeyError):
        table(file)
