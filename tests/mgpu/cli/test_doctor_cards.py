"""The check of `mgpu doctor` that no card is over its capacity."""

from datetime import UTC, datetime

import pytest

from mgpu.cli.doctor.cards import check_capacity
from mgpu.cli.doctor.installation import Installation
from mgpu.model.cards import CardState
from mgpu.model.slice_names import MIG, Slice
from mgpu.presentation.card_views import CardUse, CardView, NodeView, SliceView
from mgpu.presentation.overview import NVIDIA_PLUGIN, Overview
from mgpu.settings import load_settings
from tests.builders import card


def use(pod: str, core: int, gib: int = 1, *, certain: bool = True, dialect: str = "mgpu") -> CardUse:
    return CardUse(pod, ("c",), core, gib << 30, certain, dialect=dialect)


def messages(*uses: CardUse, slices: tuple[SliceView, ...] = ()) -> list[str]:
    shown = Overview((NodeView("n1", (CardView(CardState(card(0)), uses, MIG if slices else "", slices),)),))
    installation = Installation("mgpu-system", datetime.now(UTC), "0.1.0", load_settings(), overview=shown)
    return [finding.message for finding in check_capacity(installation) if finding.level == "failed"]


@pytest.mark.parametrize(
    "uses",
    [
        (use("a/a", 500, 40), use("a/b", 500, 40)),
        (use("a/a", 800), use("a/b", 800, certain=False)),
        (use("a/a", 1000, 80, dialect=NVIDIA_PLUGIN), use("a/b", 1000, 80, dialect=NVIDIA_PLUGIN)),
        (),
    ],
    ids=["it is full", "nobody can tell where one of them is", "NVIDIA's plugin shares it in time", "it is idle"],
)
def test_card_within_its_capacity_is_ok(uses: tuple[CardUse, ...]) -> None:
    assert messages(*uses) == []


@pytest.mark.parametrize(
    ("uses", "amounts"),
    [
        ((use("a/b", 600), use("a/a", 500)), "110% and 2.0 GiB"),
        ((use("a/b", 100, 50), use("a/a", 100, 31)), "20% and 81.0 GiB"),
        ((use("a/b", 1000, 80, dialect=NVIDIA_PLUGIN), use("a/a", 100, 1)), "110% and 81.0 GiB"),
    ],
)
def test_card_above_its_capacity_is_reported(uses: tuple[CardUse, ...], amounts: str) -> None:
    (message,) = messages(*uses)
    assert message.endswith(
        f"probably because several schedulers allocate them: card 0 of n1 (pods hold {amounts} of it: a/a, a/b)"
    )


def test_slice_with_two_holders_is_reported() -> None:
    """Two pods with one slice each are not reported, whatever the sum of their amounts is."""
    both = (use("a/a", 428, 41), use("a/b", 428, 41))
    first, second = (Slice(0, start, "3g.40gb") for start in (0, 4))
    state = CardState(card(0))
    assert messages(*both, slices=(SliceView(first, state, both), SliceView(second, state)))
    somewhere = use("a/b", 428, 41, certain=False)
    assert not messages(*both, slices=(SliceView(first, state, (both[0], somewhere)),))
    assert not messages(*both, slices=(SliceView(first, state, both[:1]), SliceView(second, state, both[1:])))


@pytest.mark.parametrize("what", ["nodes", "pods", "devices"])
def test_capacity_without_the_right_to_read_has_no_finding(what: str) -> None:
    """Without Devices, every record would seem to name a missing card."""
    shown = Overview((), unclear={"Pod a/a": "its record names card 0, which n1 does not have"})
    hidden = {what: "no"}
    installation = Installation(
        "mgpu-system", datetime.now(UTC), "0.1.0", load_settings(), overview=shown, hidden=hidden
    )
    assert list(check_capacity(installation)) == []
