"""Describes gangs that are not complete: how many members are placed, and why the next one does not fit.

`scheduler.decisions.gang_outlook` makes the views. `mgpu inspect`, `mgpu explain` and the web page show them. The
wording may change, but scripts read the JSON, so its keys must not change.
"""

from dataclasses import dataclass
from typing import Any

from mgpu.model.gangs import GangName, describe_unknown_size
from mgpu.presentation.plain_text import join_names

_MOST_NAMES = 4


@dataclass(frozen=True, slots=True)
class Outlook:
    """How many members of a gang fit at this moment, if they are placed one after the other.

    Attributes:
        fits: the number of members that fit beside those that are placed.
        misfit: the name of the first member that fits nowhere; "" if there is none, or if enough others fit.
        reason: the reason why the misfit does not fit.
    """

    fits: int
    misfit: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GangView:
    """A gang with GPU pods that wait.

    Attributes:
        needed: the number of members that must be placed at the same time; None if it is not known.
        placed: the number of members that are bound, have reserved cards, or request no GPU.
        waiting: the names of the GPU pods that wait for cards, in the order in which a scheduler tries them.
        gated: the names of the GPU pods that have scheduling gates, in the same order.
        outlook: None if it has not been computed.
    """

    name: GangName
    needed: int | None
    placed: int
    waiting: tuple[str, ...]
    gated: tuple[str, ...] = ()
    outlook: Outlook | None = None

    @property
    def missing(self) -> int:
        """The number of further pods that must be created before the gang can be complete."""
        known = self.placed + len(self.waiting) + len(self.gated)
        return max(0, (self.needed or 0) - known)

    @property
    def fits(self) -> bool:
        """Whether enough members fit now for the gang to be complete."""
        return bool(self.outlook and self.needed and self.placed + self.outlook.fits >= self.needed)


def describe_gang(view: GangView) -> str:
    """Return a text such as `2 of 4 placed; train-2 does not fit: …; waiting: train-2, train-3`."""
    if view.needed is None:
        parts = [f"{view.placed} placed; how many it needs is unknown: {describe_unknown_size(view.name)}"]
    else:
        parts = [f"{view.placed} of {view.needed} placed"]
    if view.outlook:
        parts.append(_describe_outlook(view, view.outlook))
    if view.missing:
        parts.append(f"{view.missing} more pod{'s do' if view.missing > 1 else ' does'} not exist yet")
    if view.waiting:
        parts.append(f"waiting: {join_names(view.waiting, _MOST_NAMES)}")
    if view.gated:
        parts.append(f"with scheduling gates: {join_names(view.gated, _MOST_NAMES)}")
    return "; ".join(filter(None, parts))


def _describe_outlook(view: GangView, outlook: Outlook) -> str:
    fit = f"{outlook.fits} more fit{'s' * (outlook.fits == 1)} now"
    if view.fits:
        return f"{fit}, so it does not wait for cards"
    if outlook.misfit:
        also = f"{fit}, but " if outlook.fits else ""
        return f"{also}{outlook.misfit} does not fit: {outlook.reason}"
    return fit if outlook.fits else ""


def gang_json(view: GangView) -> dict[str, Any]:
    """Return the view as JSON. `fits` and `misfit` are null if they have not been computed, or there is no misfit."""
    namespace = view.name.namespace
    outlook = view.outlook
    misfit = None
    if outlook and outlook.misfit:
        misfit = {"pod": f"{namespace}/{outlook.misfit}", "reason": outlook.reason}
    return {
        "namespace": namespace,
        "name": view.name.name,
        "source": view.name.source,
        "needed": view.needed,
        "placed": view.placed,
        "waiting": [f"{namespace}/{pod}" for pod in view.waiting],
        "gated": [f"{namespace}/{pod}" for pod in view.gated],
        "missing": view.missing,
        "fits": outlook.fits if outlook else None,
        "misfit": misfit,
    }
