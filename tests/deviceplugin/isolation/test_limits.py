"""The limits of a container, from its shares."""

import pytest

from deviceplugin.isolation.limits import CardLimit, Unenforceable, limits_of
from mgpu.model.ledger import Minor, Share
from tests.builders import GIB, cards

TWO = cards(2)


@pytest.mark.parametrize("on", [1, "GPU-n1-1", Minor(1)])
def test_card_is_found_however_the_record_names_it(on: object) -> None:
    share = Share("c", on, 500, GIB)  # type: ignore[arg-type]
    assert limits_of([share], TWO) == (CardLimit(TWO[1], GIB, 500),)


def test_limits_are_in_the_order_of_the_cards() -> None:
    shares = [Share("c", 1, 0, 2 * GIB), Share("c", 0, 300, 0)]
    assert limits_of(shares, TWO) == (CardLimit(TWO[0], None, 300), CardLimit(TWO[1], 2 * GIB, None))


def test_whole_cards_slices_and_other_devices_have_no_limits() -> None:
    whole = [Share("c", i, 1000, whole=True) for i in (0, 1)]
    others = [Share("c", 0, 500, type="rdma"), Share("c", 3, 1000, whole=True, type="mig-2g.20gb")]
    assert limits_of([*whole, *others], TWO) == ()


def test_whole_card_beside_a_share_has_a_place_among_the_limits() -> None:
    """Back ends number the cards of a container. Only a container with a whole ResourceClaim can have both."""
    shares = [Share("c", 0, 1000, whole=True), Share("c", 1, 300, GIB)]
    assert limits_of(shares, TWO) == (CardLimit(TWO[0], None, None), CardLimit(TWO[1], GIB, 300))


def test_record_without_amounts_per_container_is_unenforceable() -> None:
    with pytest.raises(Unenforceable, match="does not say how much"):
        limits_of([Share("c", 0, ratio=0)], TWO)
