"""Which isolation back end limits the containers of a node, and what it cannot hold them to."""

import pytest

from deviceplugin.isolation.backend import Ability, Unable
from deviceplugin.isolation.choice import Abilities, Choice, choose, holds_anything, not_held
from deviceplugin.isolation.limits import CardLimit
from tests.builders import GIB, cards

ALL = Ability(memory=True, compute=True, several_cards=True)
ONE_CARD = Ability(memory=True, compute=True, several_cards=False)
MEMORY = Ability(memory=True, compute=False, several_cards=True)
OLD = Unable("the driver is too old")
FIRST, SECOND = cards(2)


@pytest.mark.parametrize(
    ("setting", "label", "abilities", "choice"),
    [
        ("none", None, {"mps": ALL}, Choice("none")),
        ("mps", None, {"mps": ALL, "driver": ALL}, Choice("mps")),
        ("auto", None, {"mps": ALL, "hami-core": ALL, "driver": MEMORY}, Choice("driver")),
        ("auto", None, {"mps": ALL, "hami-core": ALL, "driver": OLD}, Choice("hami-core")),
        ("auto", None, {"mps": ALL, "hami-core": OLD}, Choice("mps")),
        (
            "auto",
            None,
            {"driver": OLD},
            Choice("none", "no isolation back end works here: driver: the driver is too old"),
        ),
        ("driver", None, {"driver": OLD, "mps": ALL}, Choice("driver", "the driver is too old")),
        ("driver", None, {"mps": ALL}, Choice("driver", "this agent does not have it")),
        ("none", "mps", {"mps": ALL}, Choice("mps")),
        ("mps", "none", {"mps": ALL}, Choice("none")),
    ],
)
def test_label_overrides_the_setting_and_auto_takes_the_strongest(
    setting: str, label: str | None, abilities: Abilities, choice: Choice
) -> None:
    assert choose(setting, label, abilities) == choice


def test_unknown_label_is_ignored_and_named() -> None:
    found = choose("mps", "HAMi", {"mps": ALL})
    assert found.name == "mps"
    assert found.problem.startswith("the Node's label mgpu.io/isolation must be one of none, mps")


@pytest.mark.parametrize(
    ("ability", "limits", "missing", "held"),
    [
        (ALL, (CardLimit(FIRST, GIB, 500), CardLimit(SECOND, GIB, 500)), (), True),
        (MEMORY, (CardLimit(FIRST, GIB, None),), (), True),
        (MEMORY, (CardLimit(FIRST, GIB, 500),), ("its compute on card 0 is not limited",), True),
        (MEMORY, (CardLimit(SECOND, None, 500),), ("its compute on card 1 is not limited",), False),
        (
            ONE_CARD,
            (CardLimit(FIRST, GIB, 500), CardLimit(SECOND, GIB, 500)),
            ("it has shares of 2 cards, but the back end limits a container on one card",),
            False,
        ),
    ],
)
def test_limits_that_a_back_end_cannot_hold_are_named(
    ability: Ability, limits: tuple[CardLimit, ...], missing: tuple[str, ...], held: bool
) -> None:
    assert not_held(ability, limits) == missing
    assert holds_anything(ability, limits) is held
