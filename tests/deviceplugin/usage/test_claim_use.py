"""The use of a claim is that of the containers that see its cards. It is unknown if these also use other shares."""

from deviceplugin.usage.claim_use import ClaimUse, claim_uses
from deviceplugin.usage.container_use import ContainerUse
from tests.builders import GIB, cards

ZERO, ONE = cards(2)


def row(pod: str, memory: int | None, sm: float | None = 0.5, claims: tuple[str, ...] = ("a",)) -> ContainerUse:
    """What the container `c` of a pod uses of card 0, which it sees by these claims."""
    return ContainerUse(f"uid-{pod}", "ns", pod, "c", ZERO, memory, sm, claims=claims)


def test_containers_of_all_pods_of_a_claim_are_added_up() -> None:
    assert claim_uses([row("p", GIB, 0.25), row("q", 2 * GIB, 0.5)]) == (ClaimUse("ns", "a", ZERO, 3 * GIB, 0.75),)


def test_use_of_the_sms_is_at_most_the_whole_card() -> None:
    assert claim_uses([row("p", GIB, 0.75), row("q", GIB, 0.75)])[0].sm == 1.0


def test_container_whose_use_is_unknown_makes_the_sum_unknown() -> None:
    assert claim_uses([row("p", GIB), row("q", None, None)]) == (ClaimUse("ns", "a", ZERO, None, None),)


def test_use_of_a_container_that_sees_the_card_by_two_claims_is_of_neither() -> None:
    found = claim_uses([row("p", GIB), row("q", GIB, claims=("a", "b"))])
    assert found == (ClaimUse("ns", "a", ZERO), ClaimUse("ns", "b", ZERO))


def test_containers_without_claims_do_not_count() -> None:
    assert claim_uses([row("p", GIB, claims=())]) == ()
