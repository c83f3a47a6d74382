"""The check of `mgpu doctor` for nodes whose MIG instances claims get."""

from dataclasses import replace
from typing import Any

import yaml

from mgpu.cli.doctor.claims import check_claims
from mgpu.cli.doctor.installation import Installation
from mgpu.model.mig_resource_slices import PublishedMigCard, make_mig_slices
from mgpu.model.node_slices import EXISTING, LABEL
from tests import builders as b
from tests.mgpu.cli.test_doctor_claims import CLASS, FOLDER, INSTALLED, SUPPORT, agent_on, slice_of

Raw = dict[str, Any]
CLASSES: list[Raw] = list(yaml.safe_load_all((FOLDER / "dra/device-class.yaml").read_text()))


def installation(*cards: PublishedMigCard, made: str = "", classes: list[Raw] = CLASSES) -> Installation:
    """Return an installation whose node n1 has the label and offers the instances of these cards."""
    node = agent_on("n1")
    node["metadata"]["labels"][LABEL] = "mig-claims"
    if made:
        node["metadata"]["annotations"][EXISTING] = made
    slices = [slice_of("n1"), *make_mig_slices("n1", "uid", cards, 1, 3)]
    return replace(INSTALLED, nodes=[node], claims=replace(SUPPORT, slices=slices, classes=classes))


def findings(found: Installation) -> list[tuple[str, str]]:
    return [(one.level, one.message) for one in check_claims(found)]


def test_node_without_faults_is_ok() -> None:
    (level, message), *rest = findings(installation(PublishedMigCard(b.card(0))))
    assert (level, rest) == ("ok", [])
    assert "published" in message


def test_node_that_offers_no_instances_is_found() -> None:
    assert findings(installation()) == [("failed", "n1 offers no MIG instances, despite gpu.partitioning=mig-claims")]


def test_card_that_is_not_in_mig_mode_is_found() -> None:
    cards = PublishedMigCard(b.card(0)), PublishedMigCard(b.card(1), in_mode=False)
    assert findings(installation(*cards)) == [
        ("warning", "not in MIG mode, so claims get no instances of them: card 1 of n1")
    ]


def test_foreign_instances_are_found() -> None:
    made = '{"cards": {"0": [{"profile": "2g.20gb", "start": 4}]}}'
    assert findings(installation(PublishedMigCard(b.card(0)), made=made)) == [
        (
            "warning",
            "MIG instances that were not created for claims keep their places from them: 2g.20gb at 4 of card 0 of n1",
        )
    ]


def test_missing_class_is_found() -> None:
    found = findings(installation(PublishedMigCard(b.card(0)), classes=[CLASS]))
    assert found == [
        ("failed", "no DeviceClass selects MIG instances, so no claim can request those of n1"),
    ]


def test_what_may_not_be_read_is_not_judged() -> None:
    found = replace(installation(), hidden={"resourceslices": "forbidden"})
    assert [level for level, _ in findings(found)] == ["ok"]
