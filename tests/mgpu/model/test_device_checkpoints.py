import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.device_checkpoints import (
    CHECKPOINTS,
    DELETED_POD,
    CheckpointEntry,
    read_entries,
    shares_by_pod,
    write_entries,
)
from mgpu.model.errors import BadObject
from mgpu.model.ledger import Share

OLDER = "node.koordinator.sh/gpu-checkpoints"
SEEDS = """[
        {
          "podUID": "fa8983dc-bb76-4eeb-8dcc-556fbd44d7ce",
          "containerName": "cuda-container",
          "resourceName": "nvidia.com/gpu",
          "deviceIDs": ["GPU-36b27e44-b086-46f7-f2dc-73c36dc65991"]
        }
      ]"""


def device(text: object, key: str = CHECKPOINTS) -> dict[str, Any]:
    return {"metadata": {"name": "n1", "annotations": {key: text}}}


@pytest.mark.parametrize("key", [CHECKPOINTS, OLDER])
def test_the_seeds_example_under_both_its_keys(key: str) -> None:
    (row,) = read_entries(device(SEEDS, key))
    uid = "fa8983dc-bb76-4eeb-8dcc-556fbd44d7ce"
    assert row == CheckpointEntry(
        uid, "cuda-container", "nvidia.com/gpu", ("GPU-36b27e44-b086-46f7-f2dc-73c36dc65991",)
    )
    (share,) = shares_by_pod([row])[uid]
    assert (share.container, share.card, share.whole) == ("cuda-container", row.ids[0], True)


def test_nothing_is_listed() -> None:
    assert read_entries({"metadata": {"name": "n1"}}) == read_entries(device("[]")) == ()


def test_what_is_listed_under_both_keys_counts_once() -> None:
    both = {"metadata": {"annotations": {CHECKPOINTS: SEEDS, OLDER: SEEDS}}}
    assert len(read_entries(both)) == 1


@pytest.mark.parametrize(
    "text",
    [SEEDS[:80], "{}", "null", "", 7, "[1]", '[{"podUID": ""}]', '[{"podUID": "u", "deviceIDs": [0]}]', "[" * 100_000],
    ids=["half written", "an object", "null", "empty", "no text", "a number", "no uid", "ids of a wrong type", "deep"],
)
def test_garbage_is_a_bad_object(text: object) -> None:
    with pytest.raises(BadObject, match=r"metadata\.annotations\[node\.koordinator\.sh/devices-checkpoints\]"):
        read_entries(device(text))


@pytest.mark.parametrize(
    ("resource", "name", "card"),
    [
        ("nvidia.com/gpu", "GPU-a", "GPU-a"),
        ("nvidia.com/gpu.shared", "GPU-a::3", "GPU-a"),
        ("nvidia.com/gpu", "1", 1),
        ("nvidia.com/mig-1g.5gb", "MIG-b", None),
        ("example.com/nic", "1", "1"),
    ],
    ids=["uuid", "a replica of it", "index", "a MIG device: on any card", "no card's index: another resource"],
)
def test_how_plugins_name_cards(resource: str, name: str, card: object) -> None:
    assert [s.card for s in shares_by_pod([CheckpointEntry("u", "c", resource, (name, name))])["u"]] == [card]


TEXTS = st.text(min_size=1, max_size=5)


@given(
    st.frozensets(st.builds(CheckpointEntry, TEXTS, TEXTS, TEXTS, st.lists(TEXTS).map(lambda ids: tuple(sorted(ids)))))
)
def test_property_what_is_written_is_read(rows: frozenset[CheckpointEntry]) -> None:
    assert set(read_entries(device(write_entries(rows)))) == rows


def test_a_row_may_say_how_much_of_a_card_is_held() -> None:
    share = Share("c", None, 400, 1 << 30, ratio=None)
    row = CheckpointEntry("u", "c", DELETED_POD, ("GPU-0", "GPU-1"), share)
    read = read_entries(device(write_entries([row])))
    assert shares_by_pod(read) == {"u": (replace(share, card="GPU-0"), replace(share, card="GPU-1"))}


def test_a_reader_that_does_not_know_amounts_holds_the_whole_card() -> None:
    """Schedulers from before they were written; they read these four keys."""
    row = CheckpointEntry("u", "c", DELETED_POD, ("GPU-0",), Share("c", None, 400))
    (written,) = json.loads(write_entries([row]))
    written.pop("share")
    assert shares_by_pod(read_entries(device(json.dumps([written])))) == {"u": (Share("c", "GPU-0", whole=True),)}


@pytest.mark.parametrize(
    "share",
    [
        7,
        {},
        {"core": -1, "memory": 0, "ratio": None},
        {"core": True, "memory": 0, "ratio": None},
        {"core": 1, "memory": "x", "ratio": 1},
    ],
)
def test_an_amount_that_cannot_be_read_is_refused(share: object) -> None:
    row = {"podUID": "u", "containerName": "c", "resourceName": DELETED_POD, "deviceIDs": ["GPU-0"], "share": share}
    with pytest.raises(BadObject, match="a valid share"):
        read_entries(device(json.dumps([row])))
