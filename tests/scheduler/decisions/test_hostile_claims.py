"""Claims with which a tenant tries to use up the time or the memory of the scheduler."""

import pytest

from mgpu.model.gpu_requests import Rejection
from scheduler.decisions.claim_decider import ClaimDecider
from scheduler.decisions.effort_budgets import EffortBudgets
from tests import builders as b
from tests.scheduler.claim_objects import Raw, claim, request, serving, submit
from tests.scheduler.cluster.objects import put, record
from tests.scheduler.fake import Replica

UUID = "gpu.mgpu.io/uuid"


def assess(replica: Replica, raw: Raw, budgets: EffortBudgets | None = None) -> Rejection | None:
    """Return why a claim does not fit on the node `n1`, as the waker asks it."""
    submit(replica.api, raw)
    replica.deliver()
    found = replica.state.claims.named("default", raw["metadata"]["name"])
    assert found is not None
    decider = ClaimDecider(replica.state, replica.api, replica.settings, budgets)
    names = {one.name for one in found.requests}
    return decider.assess(found, names, replica.state.node_snapshot("n1", found.uid))


def test_huge_count_is_rejected_at_once() -> None:
    """The API server accepts any count. Two thousand million results filled the memory."""
    rejection = assess(serving(("n1", 2)), claim("c", request(cores=1, memory="1Mi", count=2_000_000_000)))
    assert str(rejection) == "the claim requests more than 32 devices"


def test_many_requests_for_many_cards_are_rejected_at_once() -> None:
    rows = [request(f"r{i}", cores=1, memory="1Mi", count=2) for i in range(17)]
    assert str(assess(serving(("n1", 2)), claim("c", *rows))) == "the claim requests more than 32 devices"


@pytest.mark.parametrize(("cards", "is_charged"), [(32, True), (1, False)])
def test_search_for_one_request_for_several_cards_is_charged(cards: int, is_charged: bool) -> None:
    budgets = EffortBudgets(clock=lambda: 0.0, sleep=lambda _: None)
    before = budgets.remaining("default")
    raw = claim("c", request(cores=20, memory="1Gi", count=cards), constraints=({"distinctAttribute": UUID},))
    replica = serving(("n1", 64))
    put(replica, *(b.share(f"p{i}", 1 + i, annotations=record(str(i)), node="n1") for i in range(64)))
    assess(replica, raw, budgets)
    assert (budgets.remaining("default") < before) == is_charged
