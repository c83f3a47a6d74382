"""What stands in an MtgpuPod's status, and which of its changes are Events."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scheduler.mtgpupods.mtgpupod_status import (
    FALSE,
    TRUE,
    Condition,
    DesiredMtgpuPod,
    Transition,
    failed_status,
    next_status,
    transitions,
)
from tests import builders
from tests.examples import examples

NOW, LATER = "2026-11-21T00:00:00Z", "2026-11-21T00:00:09Z"
WAITS = DesiredMtgpuPod(Condition(FALSE, "ResourceExceeded", "no card"))
BOUND = DesiredMtgpuPod(
    Condition(TRUE, "Bound", "it has card 0"), None, Condition(FALSE, "AsBound", "fine"), bind="GPU-n1-0"
)


def raw(status: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    """An MtgpuPod that the API server has just taken, or with this status."""
    made = builders.mtgpupod("a")
    made["metadata"] |= {"generation": 1, **meta}
    return {**{k: v for k, v in made.items() if k != "status"}, **({"status": status} if status else {})}


def own(phase: str = "Running", **status: Any) -> dict[str, Any]:
    pod = builders.pod("a", uid="uid-pod-a", phase=phase)
    pod["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    return {**pod, "status": {**pod["status"], **status}}


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {row["type"]: (row["status"], row["reason"]) for row in status["conditions"]}


def test_one_that_waits_says_why() -> None:
    row = {"type": "Bound", "status": "False", "reason": "ResourceExceeded", "message": "no card"}
    assert next_status(raw(), WAITS, None, NOW) == {
        "phase": "Pending",
        "observedGeneration": 1,
        "conditions": [{**row, "lastTransitionTime": NOW, "observedGeneration": 1}],
    }


def test_one_that_is_bound_names_its_card() -> None:
    found = next_status(raw(), BOUND, None, NOW)
    assert found["BoundDeviceID"] == "GPU-n1-0"
    assert conditions(found) == {"Bound": ("True", "Bound"), "Degraded": ("False", "AsBound")}


def test_its_pods_status_is_mirrored() -> None:
    found = next_status(raw(), BOUND, own(conditions=[{"type": "Ready", "lastProbeTime": None}]), NOW)
    assert found["phase"] == "Running"
    assert found["PodStatus"] == {"phase": "Running", "conditions": [{"type": "Ready"}]}
    assert found["PodObjectMeta"]["uid"] == "uid-pod-a"
    assert "managedFields" not in found["PodObjectMeta"]


def test_a_pod_that_is_gone_leaves_it_pending_on_its_card() -> None:
    before = next_status(raw(), BOUND, own(), NOW)
    after = next_status(raw(before), BOUND, None, LATER)
    assert (after["phase"], after["BoundDeviceID"]) == ("Pending", "GPU-n1-0")
    assert not {"PodStatus", "PodObjectMeta"} & set(after)


def test_one_that_has_ended_stays_so_when_its_pod_goes() -> None:
    before = next_status(raw(), BOUND, own("Succeeded"), NOW)
    after = next_status(raw(before), DesiredMtgpuPod(Condition(FALSE, "Ended", "done")), None, LATER)
    assert (after["phase"], after["PodStatus"]["phase"]) == ("Succeeded", "Succeeded")


def test_what_its_pod_comes_to_by_its_deletion_is_not_its_own_end() -> None:
    before = next_status(raw(), BOUND, own(), NOW)
    deleted = own("Failed")
    deleted["metadata"]["deletionTimestamp"] = NOW
    collected = own("Failed", conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}])
    for pod in (deleted, collected):
        after = next_status(raw(before), BOUND, pod, LATER)
        assert (after["phase"], after["PodStatus"]["phase"]) == ("Running", "Failed")
    ended = next_status(raw(before), BOUND, own("Failed"), NOW)
    assert next_status(raw(ended), BOUND, deleted, NOW)["phase"] == "Failed"


def test_one_that_goes_and_has_no_pod_is_left_as_it_is() -> None:
    before = next_status(raw(), BOUND, own(), NOW)
    deleted = raw(before, deletionTimestamp=LATER, generation=2)
    assert next_status(deleted, DesiredMtgpuPod(remove_finalizer=True), None, LATER) == before


def test_what_does_not_change_is_written_as_it_was() -> None:
    before = next_status(raw(), BOUND, own(), NOW)
    assert next_status(raw(before), BOUND, own(), LATER) == before


def test_a_condition_keeps_its_time_while_its_status_is_the_same() -> None:
    before = next_status(raw(), WAITS, None, NOW)
    other = next_status(raw(before), DesiredMtgpuPod(Condition(FALSE, "NameConflict", "taken")), None, LATER)
    assert other["conditions"][0]["lastTransitionTime"] == NOW
    bound = next_status(raw(before), BOUND, None, LATER)
    assert bound["conditions"][0]["lastTransitionTime"] == LATER


def test_conditions_of_which_nothing_is_said_and_those_of_others_stay() -> None:
    theirs = {"type": "Audited", "status": "True"}
    had = {"type": "PodCreated", "status": "False", "reason": "PodForbidden", "message": "quota"}
    found = next_status(raw({"conditions": [theirs, had]}), WAITS, None, NOW)
    assert [row["type"] for row in found["conditions"]] == ["Bound", "PodCreated", "Audited"]
    assert found["conditions"][1:] == [had, theirs]


def test_the_generation_that_was_looked_at_is_told() -> None:
    found = next_status(raw(generation=7), WAITS, None, NOW)
    assert (found["observedGeneration"], found["conditions"][0]["observedGeneration"]) == (7, 7)


def test_a_pod_that_the_api_server_refuses_ends_it() -> None:
    found = failed_status(raw(), BOUND, "spec.containers[0].image: Required value", NOW)
    assert found["phase"] == "Failed"
    assert conditions(found)["PodCreated"] == ("False", "PodRefused")


def test_each_condition_that_changed_is_one_event() -> None:
    first = next_status(raw(), WAITS, None, NOW)
    waits = Transition("Bound", "False", "ResourceExceeded", "no card", warning=True)
    assert transitions(None, first) == (waits,)
    assert transitions(first, next_status(raw(first), WAITS, None, LATER)) == ()
    bound = next_status(raw(first), BOUND, None, LATER)
    assert transitions(first, bound) == (Transition("Bound", "True", "Bound", "it has card 0", warning=False),)


def test_another_message_is_no_event() -> None:
    first = next_status(raw(), WAITS, None, NOW)
    assert (
        transitions(
            first, next_status(raw(first), DesiredMtgpuPod(Condition(FALSE, "ResourceExceeded", "1")), None, NOW)
        )
        == ()
    )


def test_degraded_and_in_order_again_are_events() -> None:
    first = next_status(raw(), BOUND, None, NOW)
    bad = DesiredMtgpuPod(BOUND.bound, None, Condition(TRUE, "OtherCard", "moved"))
    second = next_status(raw(first), bad, None, LATER)
    assert transitions(first, second) == (Transition("Degraded", "True", "OtherCard", "moved", warning=True),)
    assert transitions(second, first) == (Transition("Degraded", "False", "AsBound", "fine", warning=False),)


def test_conditions_of_others_are_nobodys_event() -> None:
    assert transitions({}, {"conditions": [{"type": "Audited", "status": "True", "reason": "x"}]}) == ()


CONDITIONS = st.one_of(
    st.none(), st.builds(Condition, st.sampled_from(["True", "False"]), st.sampled_from("xy"), st.just("m"))
)
DESIRED = st.builds(DesiredMtgpuPod, CONDITIONS, CONDITIONS, CONDITIONS, st.sampled_from([None, "GPU-n1-0"]))
OWN = st.one_of(st.none(), st.sampled_from(["Pending", "Running", "Succeeded"]).map(own))


@examples(40)
@given(st.lists(st.tuples(DESIRED, OWN), min_size=1, max_size=4))
def test_writing_again_changes_nothing(history: list[tuple[DesiredMtgpuPod, dict[str, Any] | None]]) -> None:
    status: dict[str, Any] = {}
    for verdict, pod in history:
        status = next_status(raw(status), verdict, pod, NOW)
        again = next_status(raw(status), verdict, pod, LATER)
        assert (again, transitions(status, again)) == (status, ())
