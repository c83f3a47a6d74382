"""A container above its share is reported once, until it has been within it for a while."""

from collections.abc import Iterator, Sequence

import pytest

from deviceplugin.usage.container_use import ContainerUse
from deviceplugin.usage.over_share import CALM_SECONDS, OverShare, message
from tests.builders import GIB, cards

CARD, OTHER = cards(2)


def use(memory: int | None, limit: int | None = 4 * GIB, *, pod: str = "p", space: str = "ns") -> ContainerUse:
    return ContainerUse(f"uid-{pod}", space, pod, "c", CARD, memory, None, limit)


def reported(times: Sequence[tuple[float, ContainerUse]], *, held: bool = False) -> Iterator[float]:
    """Yield the times at which the container is reported."""
    over = OverShare()
    for now, one in times:
        if over.newly_over([one], lambda _: held, now):
            yield now


BELOW, ABOVE = use(4 * GIB), use(4 * GIB + 1)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        pytest.param([(0, BELOW), (1, ABOVE), (2, ABOVE), (1000, ABOVE)], [1], id="once"),
        pytest.param([(0, ABOVE), (1, BELOW), (2, ABOVE)], [0], id="not again at once"),
        pytest.param(
            [(0, ABOVE), (1, BELOW), (CALM_SECONDS, BELOW), (CALM_SECONDS + 0.5, ABOVE)], [0], id="not a moment early"
        ),
        pytest.param(
            [(0, ABOVE), (1, BELOW), (CALM_SECONDS + 1, BELOW), (CALM_SECONDS + 2, ABOVE)],
            [0, CALM_SECONDS + 2],
            id="again after a while",
        ),
        pytest.param(
            [(0, ABOVE), (1, BELOW), (200, ABOVE), (201, BELOW), (CALM_SECONDS + 50, ABOVE)],
            [0],
            id="the while begins anew",
        ),
        pytest.param(
            [(0, ABOVE), (1, use(None)), (CALM_SECONDS * 2, use(None)), (CALM_SECONDS * 2 + 1, ABOVE)],
            [0],
            id="unknown is not below",
        ),
        pytest.param([(0, use(None)), (1, ABOVE)], [1], id="unknown was not above"),
        pytest.param([(0, use(GIB, None))], [], id="no share of memory"),
    ],
)
def test_container_is_reported(times: Sequence[tuple[float, ContainerUse]], expected: Sequence[float]) -> None:
    assert list(reported(times)) == expected
    assert list(reported(times, held=True)) == []


def test_new_container_of_the_same_name_is_reported_again() -> None:
    over = OverShare()
    for now in (0.0, 1.0):
        assert over.newly_over([ABOVE], lambda _: False, now)
        assert not over.newly_over([], lambda _: False, now + 0.5)


def test_whole_card_is_never_exceeded() -> None:
    whole = ContainerUse("uid", "ns", "p", "c", CARD, CARD.memory + 1, None, CARD.memory, whole=True)
    assert not OverShare().newly_over([whole], lambda _: False, 0)


def test_message_names_the_amounts_and_the_neighbours_of_the_namespace_only() -> None:
    others = [use(0, pod="q"), use(0, pod="x", space="secret"), use(0, pod="y", space="secret")]
    far = ContainerUse("uid-z", "ns", "z", "c", OTHER)
    assert message(use(6 * GIB), [use(6 * GIB), *others, far]) == (
        f"container c uses 6.0 GiB of card 0 ({CARD.uuid}), its share is 4.0 GiB, and nothing holds it to that; "
        "the card is shared with ns/q, 2 pods of other namespaces"
    )
    assert message(use(6 * GIB), [use(6 * GIB)]).endswith("nothing holds it to that")
    many = message(use(6 * GIB), [use(0, pod=f"q{n}") for n in range(8)])
    assert many.endswith("ns/q0, ns/q1, ns/q2, ns/q3, ns/q4, 3 more pods of ns")


def test_message_shows_amounts_that_differ() -> None:
    assert f"uses {4 * GIB + 1} B of card" in message(ABOVE, [])
