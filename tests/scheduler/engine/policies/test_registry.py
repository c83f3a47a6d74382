"""Every policy of the registry can be chosen, is documented, and rates cards and nodes by exact integers."""

import re
from pathlib import Path

import pytest

from mgpu.model.card_policies import DIALECT_DEFAULTS, SELECTABLE
from mgpu.settings import CARD_POLICIES, NODE_POLICIES
from scheduler.engine import NODE_POLICIES as NODE_SCORINGS
from scheduler.engine import POLICIES
from tests.builders import GIB, state

DOCS = Path(__file__).parents[4] / "docs"


def test_settings_offer_the_selectable_policies_and_the_engine_has_all() -> None:
    assert CARD_POLICIES == NODE_POLICIES == SELECTABLE == tuple(NODE_SCORINGS)
    assert tuple(POLICIES) == (*SELECTABLE, *DIALECT_DEFAULTS)


@pytest.mark.parametrize("name", POLICIES)
def test_scoring_gives_exact_integers(name: str) -> None:
    score = POLICIES[name].scoring([state(0), state(1, 300, 10)], 20)
    for position in range(2):
        for use in ((0, 0), (100, GIB)):
            assert type(score(position, *use)) is int


@pytest.mark.parametrize("name", SELECTABLE)
def test_node_scoring_is_between_0_and_10(name: str) -> None:
    assert all(0 <= NODE_SCORINGS[name](used, 8) <= 10 for used in range(9))


@pytest.mark.parametrize("name", SELECTABLE)
def test_documents_name_the_policy(name: str) -> None:
    assert re.search(rf"^\| `{name}` \|", (DOCS / "policies.md").read_text(), re.MULTILINE)
    row = re.search(r"^\| `mgpu.io/card-policy` \|.*", (DOCS / "constraints.md").read_text(), re.MULTILINE)
    assert row is not None
    assert f"`{name}`" in row[0]
