"""docs/security.md says what each stolen token can do, and rbac.yaml agrees."""

import pytest

from tests.manifests import stolen_tokens
from tests.manifests.stolen_tokens import CONSEQUENCES, PAGE, key_of, page_with, rights, table


def test_the_page_has_the_table_of_the_roles() -> None:
    """`python -m tests.manifests.stolen_tokens` writes it."""
    assert PAGE.read_text() == page_with(table())


def test_every_consequence_is_of_a_right_that_is_given() -> None:
    assert {key_of(right) for right in rights()} == set(CONSEQUENCES)


def test_a_right_of_which_no_consequence_is_known_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    more = [*rights(), next(rights())._replace(resource="secrets", names=(), verbs=("create",))]
    monkeypatch.setattr(stolen_tokens, "rights", lambda: iter(more))
    with pytest.raises(KeyError):
        table()
