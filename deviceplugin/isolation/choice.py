"""Chooses the isolation back end of the node and of a container. The functions are pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from deviceplugin.isolation.backend import Ability, Unable
from deviceplugin.isolation.limits import CardLimit
from mgpu.model.isolation import AUTO, CHOICES, ISOLATION_LABEL, NONE, STRONGEST_FIRST

Abilities = Mapping[str, Ability | Unable]
"""What each back end can do on this node, by its name."""


MISSING = Unable("this agent does not have it")
"""The ability of a back end that the agent lacks, such as `driver` on simulated cards without the playground."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The back end that limits containers.

    Attributes:
        name: `none` or one of `STRONGEST_FIRST`.
        problem: Why that back end limits nothing, or why another one was wanted, as a clause; "" if all is well.
    """

    name: str
    problem: str = ""


def choose(setting: str, label: str | None, abilities: Abilities) -> Choice:
    """Return the back end of the node for pods that name none.

    Args:
        setting: The setting `deviceplugin.isolation`.
        label: The value of the Node's label that overrides the setting; None if the Node does not have it.
    """
    wanted = setting if label is None or label not in CHOICES else label
    if wanted == AUTO:
        able = [name for name in STRONGEST_FIRST if isinstance(abilities.get(name), Ability)]
        chosen = Choice(able[0]) if able else Choice(NONE, f"no isolation back end works here: {_reasons(abilities)}")
    else:
        found = abilities.get(wanted, MISSING) if wanted != NONE else None
        chosen = Choice(wanted, found.reason if isinstance(found, Unable) else "")
    if label is not None and label not in CHOICES:
        what = f"the Node's label {ISOLATION_LABEL} must be one of {', '.join(CHOICES)}, not {label}; it is ignored"
        return Choice(chosen.name, "; ".join(filter(None, (what, chosen.problem))))
    return chosen


def _reasons(abilities: Abilities) -> str:
    return "; ".join(
        f"{name}: {found.reason}" for name in STRONGEST_FIRST if isinstance(found := abilities.get(name), Unable)
    )


def not_held(ability: Ability, limits: tuple[CardLimit, ...], *, is_shared: bool = False) -> tuple[str, ...]:
    """Return what the back end cannot hold the container to, as clauses; () if it can hold all limits.

    Args:
        is_shared: Whether several containers have the limits together.
    """
    if is_shared and not ability.sharable:
        return ("several containers may use it, but the back end limits a single container",)
    if len(limits) > 1 and not ability.several_cards:
        return (f"it has shares of {len(limits)} cards, but the back end limits a container on one card",)
    memory = [limit for limit in limits if limit.memory is not None and not ability.memory]
    compute = [limit for limit in limits if limit.compute is not None and not ability.compute]
    return (
        *(f"its memory on card {limit.card.index} is not limited" for limit in memory),
        *(f"its compute on card {limit.card.index} is not limited" for limit in compute),
    )


def holds_anything(ability: Ability, limits: tuple[CardLimit, ...], *, is_shared: bool = False) -> bool:
    """Return whether the back end can hold the container to at least one of its limits."""
    if is_shared and not ability.sharable:
        return False
    if len(limits) > 1 and not ability.several_cards:
        return False
    return any(
        (limit.memory is not None and ability.memory) or (limit.compute is not None and ability.compute)
        for limit in limits
    )
