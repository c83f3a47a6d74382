"""The ledger: whatever happened before, what it says follows from the holdings and the cards alone."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.cards import Card, CardState
from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, Placement, whole_cards
from mgpu.model.groups import Group, GroupCard
from mgpu.model.ledger import Holding, Ledger, Minor, Share, missing_cards, shares_of, unknown_shares
from mgpu.model.pod_constraints import Constraints
from mgpu.model.pods import Stage
from tests.builders import GIB, card, cards


def holding(uid: str = "u", *shares: Share, node: str = "n1") -> Holding:
    return Holding(uid, "default", f"pod-{uid}", node, "mgpu", shares)


def used(ledger: Ledger, node: str = "n1") -> list[tuple[int, int, int]]:
    return [(s.core_used, s.memory_used // GIB, s.shares) for s in ledger.cards(node)]


def test_a_release_gives_back_exactly_what_was_taken() -> None:
    ledger = Ledger()
    ledger.set_cards("n1", cards(2))
    ledger.hold(holding("a", Share("c", 0, 300, 2 * GIB)))
    ledger.hold(holding("b", Share("c", 0, 200, GIB), Share("d", "GPU-n1-1", 500, GIB)))
    assert used(ledger) == [(500, 3, 2), (500, 1, 1)]
    ledger.release("a")
    assert used(ledger) == [(200, 1, 1), (500, 1, 1)]
    assert ledger.release("a") is None


def test_a_new_holding_replaces_the_uids_old_one_on_any_node() -> None:
    ledger = Ledger()
    for node in ("n1", "n2"):
        ledger.set_cards(node, cards(1, node=node))
        ledger.hold(holding("a", Share("c", 0, 300), node=node))
    assert used(ledger, "n1") == [(0, 0, 0)]
    assert used(ledger, "n2") == [(300, 0, 1)]


def test_cards_that_change_meanwhile() -> None:
    ledger = Ledger()
    ledger.hold(holding("a", Share("c", 1, 300, GIB)))
    assert ledger.cards("n1") == ()
    ledger.set_cards("n1", cards(2))
    assert used(ledger) == [(0, 0, 0), (300, 1, 1)]
    ledger.set_cards("n1", cards(1))
    assert used(ledger) == [(0, 0, 0)]
    ledger.set_cards("n1", None)
    ledger.set_cards("n1", cards(2))
    assert used(ledger) == [(0, 0, 0), (300, 1, 1)]
    ledger.release("a")
    assert used(ledger) == [(0, 0, 0), (0, 0, 0)]


def test_a_whole_share_is_the_card_at_its_size_now() -> None:
    ledger = Ledger()
    ledger.hold(holding("a", Share("c", 0, 1000, whole=True)))
    for gib in (80, 40):
        ledger.set_cards("n1", cards(1, gib=gib))
        assert used(ledger) == [(1000, gib, 1)]


def test_devices_of_other_types_are_accounted_by_themselves() -> None:
    ledger = Ledger()
    ledger.set_cards("n1", (*cards(1), Card(0, "rdma-0", "", 0, type="rdma"), Card(1, "x", "", 0, type="fpga")))
    wanted = GpuRequest(
        "koordinator",
        (ContainerRequest("c", core=500, ratio=50),),
        others=(ContainerRequest("c", core=300, type="rdma"),),
    )
    ledger.hold(holding("a", *shares_of(wanted, Placement((("c", (0,)),), others=(("rdma", "c", (0,)),)))))
    assert used(ledger) == [(500, 40, 1)]
    assert [(s.card.type, s.core_used) for s in ledger.others("n1")] == [("fpga", 0), ("rdma", 300)]
    assert [s.core_used for s in ledger.others("n1", without="a")] == [0, 0]
    ledger.hold(holding("a", *unknown_shares(wanted)))
    assert [(s.card.type, s.core_used) for s in ledger.others("n1")] == [("fpga", 0), ("rdma", 300)]


def test_memory_in_percent_is_counted_for_those_who_ask_so() -> None:
    ledger = Ledger()
    ledger.set_cards("n1", cards(1))
    ledger.hold(holding("a", Share("c", 0, 0, 10 * GIB)))
    ledger.hold(holding("b", Share("c", 0, 0, GIB, ratio=0), Share("d", 0, ratio=29)))
    (state,) = ledger.cards("n1")
    assert (state.ratio_used, state.ratio_free) == (2 + 29, 69)
    assert state.memory_used == 11 * GIB + 29 * 80 * GIB // 100


def test_a_record_may_name_a_card_by_its_minor() -> None:
    ledger = Ledger()
    ledger.set_cards("n1", (replace(card(0), minor=3), replace(card(1), minor=None)))
    ledger.hold(holding("a", Share("c", Minor(3), 300), Share("c", Minor(1), 200), Share("c", Minor(0), 100)))
    assert used(ledger) == [(300, 0, 1), (200, 0, 1)]


def test_a_share_on_nobody_knows_which_card_is_held_on_all() -> None:
    ledger = Ledger()
    ledger.set_cards("n1", cards(3))
    ledger.hold(holding("a", *unknown_shares(GpuRequest("mgpu", (ContainerRequest("c", core=400, memory=GIB),)))))
    assert used(ledger) == [(400, 1, 1)] * 3


def test_init_containers_and_app_containers_share_a_card_in_turn() -> None:
    ledger = Ledger()
    ledger.set_cards("n1", cards(1))
    ledger.hold(
        holding(
            "a",
            Share("i", 0, 700, GIB, stage=Stage.INIT),
            Share("s", 0, 100, GIB, stage=Stage.SIDECAR),
            Share("c", 0, 300, 4 * GIB),
        )
    )
    assert used(ledger) == [(700, 5, 2)]


def test_deciding_again_leaves_the_pods_own_holding_out() -> None:
    ledger = Ledger()
    ledger.set_cards("n1", cards(1))
    ledger.hold(holding("a", Share("c", 0, 300)))
    ledger.hold(holding("b", Share("c", 0, 200)))
    assert ledger.cards("n1", without="a")[0].core_used == 200
    assert ledger.cards("n1")[0].core_used == 500


def test_over_capacity_is_no_free_space_rather_than_negative() -> None:
    state = CardState(card(0, gib=1), core_used=1500, memory_used=5 * GIB, shares=2)
    assert (state.core_free, state.memory_free, state.idle) == (0, 0, False)


def test_shares_follow_the_ask_and_its_placement() -> None:
    request = GpuRequest("mgpu", (ContainerRequest("a", 2, 100, GIB), whole_cards("b", 1)))
    shares = shares_of(request, Placement((("a", (0, 2)), ("b", (1,)))))
    assert [(s.container, s.card, s.core, s.whole) for s in shares] == [
        ("a", 0, 100, False),
        ("a", 2, 100, False),
        ("b", 1, 1000, True),
    ]


def test_holdings_have_one_order() -> None:
    ledger = Ledger()
    for uid in ("b", "c", "a"):
        ledger.hold(holding(uid))
    assert [h.uid for h in ledger.holdings()] == [h.uid for h in ledger.holdings("n1")] == ["a", "b", "c"]
    assert ledger.holdings("other") == ()


_shares = st.builds(
    Share,
    st.sampled_from(["c", "d"]),
    st.none() | st.integers(0, 3) | st.sampled_from([f"GPU-n1-{i}" for i in range(3)]) | st.integers(0, 3).map(Minor),
    st.integers(0, 1000),
    st.integers(0, 1 << 34),
    st.booleans(),
    st.sampled_from(Stage),
    st.none() | st.integers(0, 100),
    st.sampled_from(["gpu", "gpu", "rdma"]),
)


def _of_both_types(indexes: list[int]) -> tuple[Card, ...]:
    return tuple(c for i in indexes for c in (Card(i, f"rdma-{i}", "", 0, type="rdma"), card(i)))


_nodes = st.sampled_from(["n1", "n2"])
_card_lists = st.none() | st.lists(st.integers(0, 3), unique=True).map(_of_both_types)
_gpuids = st.sampled_from([("", False)] * 2 + [(gpuid, occupies) for gpuid in "xy" for occupies in (False, True)])
_events = st.one_of(
    st.tuples(st.just("hold"), st.sampled_from("abcd"), _nodes, st.lists(_shares, max_size=3).map(tuple), _gpuids),
    st.tuples(st.just("release"), st.sampled_from("abcd")),
    st.tuples(st.just("cards"), _nodes, _card_lists),
    st.tuples(st.just("look"), _nodes),
)


@given(st.lists(_events, max_size=25))
def test_property_any_history_equals_a_ledger_rebuilt_from_what_is(events: list[tuple[object, ...]]) -> None:
    ledger = Ledger()
    held: dict[str, Holding] = {}
    there: dict[str, tuple[Card, ...]] = {}
    for event in events:
        match event:
            case ("hold", str(uid), str(node), tuple(shares), (str(gpuid), bool(occupies))):
                held[uid] = Holding(uid, "default", uid, node, "mgpu", shares, gpuid=gpuid, occupies=occupies)
                ledger.hold(held[uid])
            case ("release", str(uid)):
                assert ledger.release(uid) == held.pop(uid, None)
            case ("cards", str(node), found):
                there.pop(node, None)
                if isinstance(found, tuple):
                    there[node] = found
                ledger.set_cards(node, there.get(node))
            case ("look", str(node)):
                ledger.cards(node)
    rebuilt = Ledger()
    for one in sorted(held.values(), key=lambda h: h.uid):
        rebuilt.hold(one)
    for node, found in sorted(there.items()):
        rebuilt.set_cards(node, found)
    assert ledger == rebuilt
    assert ledger.holdings() == rebuilt.holdings()
    assert all(
        s.core_used >= 0 and s.memory_used >= 0 and s.ratio_used >= 0 and s.idle == (s.shares == 0)
        for n in there
        for s in (*ledger.cards(n), *ledger.others(n))
    )
    for node in there:
        check_gpuids(ledger, node)
        without = Ledger()
        without.set_cards(node, there[node])
        for one in held.values():
            if one.uid not in "ab":
                without.hold(one)
        once_gone = ledger.states_without(node, "ab")
        assert [s for s in once_gone if s.card.type == "gpu"] == [*without.cards(node)]


def check_gpuids(ledger: Ledger, node: str) -> None:
    """Check that a GPUID's card has no other pods, and is the card of its MtgpuPods, or else of its occupy pod."""
    held = ledger.holdings(node)
    for state in ledger.cards(node):
        known = [h for h in held if h.gpuid and h.is_known_on(state.card)]
        users = {h.gpuid for h in known if not h.occupies}
        if users:
            assert state.gpuid == min(users)
        elif state.gpuid:
            assert any(h.gpuid == state.gpuid for h in known)
            placed = (h for h in held if h.gpuid == state.gpuid and not h.occupies)
            assert not any(h.is_known_on(s.card) for h in placed for s in ledger.cards(node))
        if state.gpuid:
            assert (state.core_free, state.memory_free, state.ratio_free, state.idle) == (0, 0, 0, False)
            others = [h.uses(state.card) for h in held if not (h.occupies and h.gpuid == state.gpuid)]
            assert state.core_used == sum(used.core for used in others)
            assert state.card in [s.card for s in ledger.states_for_gpuid(node, state.gpuid)]
    for gpuid in {h.gpuid for h in held if h.gpuid}:
        found = ledger.states_for_gpuid(node, gpuid)
        marked = [CardState(s.card) for s in ledger.cards(node) if s.gpuid == gpuid]
        assert found == (tuple(marked) or ledger.cards(node))


def user(uid: str, card: str | int | None, core: int = 200, gpuid: str = "x") -> Holding:
    return replace(holding(uid, Share("", card, core, GIB)), gpuid=gpuid)


def occupy(uid: str, card: str | int | None, gpuid: str = "x") -> Holding:
    return replace(holding(uid, Share("c", card, whole=True)), gpuid=gpuid, occupies=True)


def test_an_occupy_pod_is_not_counted_beside_its_mtgpupods() -> None:
    ledger = Ledger()
    ledger.set_cards("n1", cards(2))
    for one in (occupy("o", 1), user("a", "GPU-n1-1"), user("b", 1, 700)):
        ledger.hold(one)
    left = [(s.gpuid, s.core_used, s.core_left, s.core_free) for s in ledger.cards("n1")]
    assert left == [("", 0, 1000, 1000), ("x", 900, 100, 0)]


def test_an_occupy_pod_alone_marks_its_card_and_elsewhere_holds_it_whole() -> None:
    ledger = Ledger()
    ledger.set_cards("n1", cards(2))
    ledger.hold(occupy("o", 1))
    assert [(s.gpuid, s.core_used) for s in ledger.cards("n1")] == [("", 0), ("x", 0)]
    ledger.hold(user("a", 0))
    assert [(s.gpuid, s.core_used) for s in ledger.cards("n1")] == [("x", 200), ("", 1000)]
    ledger.release("o")
    assert [(s.gpuid, s.core_used) for s in ledger.cards("n1")] == [("x", 200), ("", 0)]


def test_its_occupy_pod_finds_the_card_of_a_gpuid_as_if_it_were_idle() -> None:
    ledger = Ledger()
    ledger.set_cards("n1", cards(2))
    ledger.hold(user("a", 1))
    ledger.hold(user("b", None, gpuid="y"))
    assert ledger.states_for_gpuid("n1", "x") == (CardState(card(1)),)
    assert ledger.states_for_gpuid("n1", "y") == ledger.cards("n1")
    ledger.hold(occupy("o", 0, "z"))
    assert [s.card.index for s in ledger.states_for_gpuid("n1", "z")] == [0]
    assert len(ledger.states_for_gpuid("n1", "z", "o")) == 2


PAIR, WEB = Group("same-card-group", "default", "pair"), Group("spread-group", "default", "web")


def member(uid: str, *shares: Share, node: str = "n1", both: bool = False) -> Holding:
    constraints = Constraints(same_card=PAIR, spread=WEB if both else None)
    return replace(holding(uid, *shares, node=node), constraints=constraints)


def test_groups_are_on_the_cards_that_their_pods_hold() -> None:
    ledger = Ledger()
    ledger.set_cards("n1", cards(3))
    ledger.hold(member("a", Share("c", "GPU-n1-1", 300), both=True))
    ledger.hold(holding("b", Share("c", 0, 300)))
    assert [state.groups for state in ledger.cards("n1")] == [frozenset(), {PAIR, WEB}, frozenset()]
    assert [state.groups for state in ledger.cards("n1", without="a")] == [frozenset()] * 3
    assert ledger.groups() == (PAIR, WEB)
    ledger.release("a")
    assert ledger.groups() == ()


def test_where_a_group_is() -> None:
    ledger = Ledger()
    ledger.set_cards("n1", cards(2))
    ledger.hold(member("a", Share("c", "GPU-n1-1", 300), Share("d", 1, 100)))
    ledger.hold(member("b", Share("c", "GPU-gone", 300), node="n1"))
    ledger.hold(member("c", Share("c", None, 300), node="n2"))
    assert list(map(str, ledger.group_cards(PAIR))) == ["card 1 of n1", "card GPU-gone of n1", "an unknown card of n2"]
    assert list(map(str, ledger.group_cards(PAIR, without="c"))) == ["card 1 of n1", "card GPU-gone of n1"]
    assert ledger.group_cards(WEB) == ledger.group_cards(None) == ()
    assert [held.uid for held in ledger.members(PAIR)] == ["a", "b", "c"]


def test_a_share_on_an_unknown_card_puts_its_group_on_none() -> None:
    ledger = Ledger()
    ledger.set_cards("n1", cards(2))
    ledger.hold(member("a", Share("c", None, 300), both=True))
    assert [state.groups for state in ledger.cards("n1")] == [frozenset()] * 2


moves = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["n1", "n2", ""]), st.integers(0, 1), st.booleans()), max_size=12
)


@given(moves)
def test_property_the_index_of_groups_follows_from_the_holdings(steps: list[tuple[str, str, int, bool]]) -> None:
    ledger = Ledger()
    for uid, node, index, both in steps:
        if node:
            ledger.hold(member(uid, Share("c", index, 100), node=node, both=both))
        else:
            ledger.release(uid)
        for group in (PAIR, WEB):
            those = [held for held in ledger.holdings() if group in held.constraints.groups]
            assert {held.uid for held in ledger.members(group)} == {held.uid for held in those}
            assert set(ledger.group_cards(group)) == {GroupCard(h.node, str(s.card)) for h in those for s in h.shares}
            assert (group in ledger.groups()) is bool(those)


def test_a_record_may_name_cards_that_are_not_there() -> None:
    shares = [Share("c", 0), Share("c", Minor(7)), Share("c", "GPU-x"), Share("c", 3, type="rdma"), Share("c", None)]
    assert missing_cards(shares, cards(2)) == ("card GPU-x", "card of minor 7", "rdma device 3")
