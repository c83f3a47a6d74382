"""docs/metrics.md has every metric, rule and reason that there is, and no other."""

import re
from pathlib import Path

import pytest

from mgpu.model.errors import Rule
from mgpu.model.gpu_requests import RejectionKind
from tests.metrics import metrics

TEXT = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
TITLES = {"scheduler": "The scheduler", "webhook": "The webhook", "deviceplugin": "The node agent"}


@pytest.mark.parametrize("process", TITLES)
def test_the_table_of_each_process(process: str) -> None:
    table = TEXT.partition(f"## {TITLES[process]}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()[2:]]
    told = [(name.strip("`"), type_, text) for name, type_, _, text in rows]
    suffix = {"counter": "_total"}
    assert told == sorted((m.name + suffix.get(m.type, ""), m.type, m.documentation) for m in metrics(process))


@pytest.mark.parametrize(
    ("label", "known"),
    [("`rule`", tuple(Rule)), ("`reason` of `mgpu_rejections_total`", tuple(RejectionKind))],
)
def test_what_labels_can_be(label: str, known: tuple[str, ...]) -> None:
    line = TEXT.partition(f"- {label}: ")[2].partition("\n-")[0]
    assert re.findall(r"`([\w-]+)`", line) == list(known)
