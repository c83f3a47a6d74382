"""Reads ResourceClaims for the snapshot of a cluster: what they hold, and which of them wait for cards.

A claim holds cards as a pod does, and several pods may use it. So it is shown in place of its pods, by a name that no
pod can have: `claim team/train-gpu`. The scheduler's view and the one from lists use the same functions.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mgpu.model.claim_object import read_stored_claim
from mgpu.model.errors import BadObject
from mgpu.model.ledger import Holding
from mgpu.model.pod_constraints import NO_CONSTRAINTS, Constraints
from mgpu.model.raw_objects import table_at
from mgpu.model.resource_claims import DRA, DRIVER, Claim, claim_holding
from mgpu.settings import CARD_POLICIES

Raw = Mapping[str, Any]
_KIND = "claim "


@dataclass(frozen=True, slots=True)
class ClaimViews:
    """The ResourceClaims of a cluster that concern mgpu's driver.

    Attributes:
        holdings: what the allocated claims hold.
        waiting: the names of the claims that pods wait for, as `holder_name` returns them.
        constraints: the constraints of the claims that hold or wait, by the same names.
        unclear: the reasons why claims cannot be read, by `ResourceClaim namespace/name`.
    """

    holdings: tuple[Holding, ...] = ()
    waiting: tuple[str, ...] = ()
    constraints: Mapping[str, Constraints] = field(default_factory=dict)
    unclear: Mapping[str, str] = field(default_factory=dict)


NO_CLAIMS = ClaimViews()


def holder_name(holding: Holding) -> str:
    """Return the name of what holds the cards: `namespace/name` for a pod, and for a claim `claim namespace/name`.

    It is `pod UID` if only the UID is known.
    """
    if holding.dialect == DRA:
        return claim_name(holding.key)
    return holding.key if holding.name else f"pod {holding.uid}"


def claim_name(key: str) -> str:
    """Return the name of a claim as the commands show it.

    Args:
        key: the claim as `namespace/name`.
    """
    return f"{_KIND}{key}"


def split_name(holder: str) -> tuple[str, str]:
    """Return the namespace and the name from the result of `holder_name`. The name of a claim begins with `claim `."""
    namespace, _, name = holder.removeprefix(_KIND).partition("/")
    return namespace, f"{_KIND}{name}" if holder.startswith(_KIND) else name


def read_claims(raws: Iterable[Raw], classes: Iterable[Raw] = ()) -> ClaimViews:
    """Read all ResourceClaims.

    Args:
        classes: the DeviceClasses, which say whether a claim without an allocation concerns mgpu's driver.
    """
    ours = {str(raw["metadata"]["name"]) for raw in classes if any(map(_is_ours, _expressions(raw)))}
    claims = []
    unclear = {}
    for raw in raws:
        try:
            claims.append(read_stored_claim(raw, CARD_POLICIES))
        except BadObject as error:
            unclear[f"ResourceClaim {raw['metadata'].get('namespace')}/{raw['metadata']['name']}"] = str(error)
    return view_claims(claims, lambda name: name in ours, unclear)


def view_claims(
    claims: Iterable[Claim], is_our_class: Callable[[str], bool], unclear: Mapping[str, str] | None = None
) -> ClaimViews:
    """Return the views of claims.

    Args:
        is_our_class: returns whether the DeviceClass with this name selects devices of mgpu's driver.
    """
    holdings = []
    waiting = []
    constraints = {}
    for claim in sorted(claims, key=lambda claim: (claim.namespace, claim.name, claim.uid)):
        name = claim_name(claim.key)
        holding = claim_holding(claim)
        if holding is not None:
            holdings.append(holding)
        elif _waits(claim, is_our_class):
            waiting.append(name)
        else:
            continue
        if claim.card_constraints != NO_CONSTRAINTS:
            constraints[name] = claim.card_constraints
    return ClaimViews(tuple(holdings), tuple(waiting), constraints, unclear or {})


def selects_our_devices(selectors: Collection[str] | None) -> bool:
    """Return whether a DeviceClass with these CEL expressions selects devices of mgpu's driver."""
    return any(map(_is_ours, selectors or ()))


def _waits(claim: Claim, is_our_class: Callable[[str], bool]) -> bool:
    """Return whether a pod waits for the claim.

    Only a claim that was created for a pod surely has one. Users may create other claims long before they use them.
    """
    if claim.allocated or claim.deleting or not claim.owner:
        return False
    return any(is_our_class(request.device_class) for request in claim.requests)


def _is_ours(expression: str) -> bool:
    return DRIVER in expression


def _expressions(device_class: Raw) -> Iterator[str]:
    rows = table_at(device_class, "spec").get("selectors")
    for row in rows if isinstance(rows, list) else ():
        expression = table_at(row, "cel").get("expression")
        if isinstance(expression, str):
            yield expression
