"""Names of objects are those that the API server accepts, so that none of them leads to another path."""

import pytest

from mgpu.model.object_names import is_namespace_name, is_object_name


@pytest.mark.parametrize("name", ["a", "0", "train-0", "a.b-c", "x" * 253])
def test_names_of_objects(name: str) -> None:
    assert is_object_name(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a..b", ".a", "a.", "-a", "a-", "a-.b", "A", "ä", "٣", "a/b", "a b", "a\n", "x" * 254]
)
def test_other_texts_are_no_names(name: str) -> None:
    assert not is_object_name(name)
    assert not is_namespace_name(name)


def test_a_namespace_is_one_label() -> None:
    assert is_namespace_name("team-a")
    assert is_namespace_name("x" * 63)
    assert not is_namespace_name("x" * 64)
    assert not is_namespace_name("team.a")
