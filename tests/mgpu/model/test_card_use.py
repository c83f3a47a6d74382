from mgpu.model.card_use import CardUse, card_uses, held_amounts
from mgpu.model.cards import Card, CardState
from mgpu.model.ledger import Holding, Share

GIB = 1 << 30
A, B = (Card(i, f"GPU-{i}", "A100", 80 * GIB) for i in range(2))


def slice_of(card: Card, start: int) -> Card:
    return Card(card.index * 100 + start, f"MIG-{card.index}-{start}", "A100", 20 * GIB, 285, type="mig-2g.20gb")


def test_a_card_that_is_cut_is_used_as_its_slices_are() -> None:
    slices = (CardState(slice_of(B, 0), 285, 20 * GIB, 1), CardState(slice_of(B, 4)))
    assert card_uses((A, B), (CardState(A), *slices)) == (
        CardUse(A, 0, 0, idle=True, shared=True),
        CardUse(B, 285, 20 * GIB, idle=False, shared=False),
    )


def test_nobody_gets_what_is_free_of_a_card_with_a_gpuid() -> None:
    (use,) = card_uses((A,), (CardState(A, 300, GIB, 1, gpuid="zxcvb"),))
    assert use == CardUse(A, 300, GIB, idle=False, shared=False)


def test_a_pod_is_counted_on_all_its_cards_however_they_are_named() -> None:
    for names in ((A.index, B.index), (A.uuid, B.uuid)):
        shares = tuple(Share("c", name, 200, GIB) for name in names)
        assert held_amounts(Holding("u", "ns", "p", "n1", "mgpu", shares), (A, B)) == (400, 2 * GIB)
