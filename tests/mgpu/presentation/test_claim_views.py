"""ResourceClaims in the snapshot of a cluster."""

from typing import Any

import pytest

from mgpu.cli.inspect import overview_json
from mgpu.model.ledger import Holding
from mgpu.model.resource_claims import DRA
from mgpu.presentation.claim_views import holder_name, read_claims, split_name
from mgpu.presentation.overview import Overview, make_overview
from mgpu.presentation.utilization import holders
from mgpu.settings import load_settings
from tests import builders as b
from tests.claim_objects import CLASS, Raw, claim
from tests.mgpu.presentation.test_overview import DEVICE, ON_CARD_1

OTHER: Raw = {"metadata": {"name": "nics"}, "spec": {"selectors": [{"cel": {"expression": "true"}}]}}


def overview(*claims: Raw, pods: tuple[Raw, ...] = ()) -> Overview:
    views = read_claims(claims, [CLASS, OTHER])
    return make_overview([b.node()], [DEVICE], pods, load_settings(), claims=views)


def test_claim_holds_its_cards_beside_pods_and_has_a_name_that_no_pod_can_have() -> None:
    found = overview(claim("train", 1), pods=(b.share("train", node="n1", annotations=ON_CARD_1),))
    uses = found.nodes[0].cards[1].uses
    assert {(use.pod, use.dialect) for use in uses} == {("default/train", "mgpu"), ("claim ml/train", DRA)}
    assert sum(use.core for use in uses) == found.nodes[0].cards[1].state.core_used
    answer: Any = overview_json(found)
    assert answer["nodes"]["n1"]["cards"][1]["holders"] == ["claim ml/train/gpu", "default/train/c"]
    assert answer["dialects"]["claim ml/train"] == DRA
    assert found.unclear == {}


def test_claim_for_several_cards_is_one_holder() -> None:
    (row,) = holders(overview(claim("wide", 0, 1, cores=50)).nodes)
    assert (row.pod, row.cards, row.core, row.dialect) == ("claim ml/wide", 2, 1000, DRA)


def test_claim_waits_if_it_was_created_for_a_pod_and_requests_cards_of_mgpu() -> None:
    found = overview(
        claim("waits", of_pod="u", annotations={"mgpu.io/card-models": "H100"}),
        claim("nobody-uses-it"),
        claim("nic", of_pod="u", device_class="nics"),
        claim("allocated-by-another-driver", 0, of_pod="u", driver="nics.example.com"),
        {**claim("gone", of_pod="u"), "metadata": claim("gone", of_pod="u")["metadata"] | {"deletionTimestamp": "x"}},
    )
    assert found.pending == ("claim ml/waits",)
    assert {name: str(value) for name, value in found.constraints.items()} == {"claim ml/waits": "card-models H100"}
    assert all(card.state.idle for card in found.nodes[0].cards)


def test_claim_on_a_card_that_its_node_lacks_is_unclear() -> None:
    found = overview(claim("lost", 7), claim("elsewhere", 0, node="gone"))
    assert found.unclear == {
        "ResourceClaim ml/lost": "its allocation names card 7, which n1 does not have",
        "ResourceClaim ml/elsewhere": "its allocation names card 0, which gone does not have",
    }


def test_claim_with_an_annotation_that_cannot_be_read_holds_its_cards() -> None:
    found = overview(claim("odd", 0, annotations={"mgpu.io/card-policy": "unknown"}))
    assert [use.pod for use in found.nodes[0].cards[0].uses] == ["claim ml/odd"]


def test_claim_that_cannot_be_read_is_unclear() -> None:
    found = overview(claim("odd", 0, memory="much"))
    assert list(found.unclear) == ["ResourceClaim ml/odd"]


def test_claims_belong_to_groups() -> None:
    (group,) = overview(claim("member", 1, annotations={"mgpu.io/same-card-group": "pair"})).groups
    assert group.pods == ("claim ml/member",)


@pytest.mark.parametrize(
    ("dialect", "name", "shown", "parts"),
    [
        (DRA, "x", "claim ml/x", ("ml", "claim x")),
        ("mgpu", "x", "ml/x", ("ml", "x")),
        ("nvidia", "", "pod u", None),
    ],
)
def test_name_of_a_holder_says_what_it_is(dialect: str, name: str, shown: str, parts: tuple[str, str] | None) -> None:
    assert holder_name(Holding("u", "ml", name, "n1", dialect, ())) == shown
    assert parts is None or split_name(shown) == parts
