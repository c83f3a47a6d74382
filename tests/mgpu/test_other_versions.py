"""What a newer part writes an older one reads: what it does not know means nothing to it, and the rest as before."""

import json
from typing import Any

from mgpu import dialects
from mgpu.model.device_object import read_device, write_device
from mgpu.model.node_slices import ANNOTATION, EXISTING, LABEL, read_slices
from mgpu.model.pods import Node, read_node, read_pod
from mgpu.settings import load_settings
from mgpu.version import AGENT_ANNOTATION, AgentReport, read_agent_report, write_agent_report
from tests import builders as b

MORE = {"future": {"a": [1]}}


def test_a_device() -> None:
    raw: dict[str, Any] = write_device(Node("n1"), "", b.cards(1))
    known = read_device(raw)
    rows = [{**row, **MORE} for row in raw["spec"]["devices"]]
    assert read_device({**raw, **MORE, "spec": {"devices": rows, **MORE}}) == known != ()


def test_how_a_nodes_cards_are_cut() -> None:
    counts = {"spec-gpu-0-1g.10gb": 1, "spec-partitioning-plan": 7, "status-partitioning-plan": 7}
    row = {"profile": "1g.10gb", "start": 0}
    raw = b.node(labels={LABEL: "mig"})

    def read(**more: Any) -> Any:
        raw["metadata"]["annotations"] = {
            ANNOTATION: json.dumps(counts | more),
            EXISTING: json.dumps({"cards": {"0": [row | more]}} | more),
        }
        return read_slices(read_node(raw))

    assert read(**MORE) == read()
    assert read().existing


def test_a_pods_record() -> None:
    settings = load_settings()
    amounts = {"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory-ratio": "50"}
    raw = b.pod("p", {"name": "c", "resources": {"requests": amounts, "limits": dict(amounts)}}, node="n1")
    row = {"minor": 1, "resources": {"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory-ratio": "50"}}

    def read(text: object, **annotations: str) -> Any:
        record = {"scheduling.koordinator.sh/device-allocated": json.dumps(text), **annotations}
        pod = read_pod({**raw, "metadata": {**raw["metadata"], "annotations": record}})
        request = dialects.read_request(pod, settings)
        assert request
        return dialects.by_name(request.dialect).read_placement(pod, request)

    known = read({"gpu": [row]})
    assert [(share.container, share.core) for share in known] == [("c", 500)]
    assert read({"gpu": [{**row, **MORE}]}, **{"mgpu.io/future": "1"}) == known


def test_what_an_agent_says_of_itself() -> None:
    said = AgentReport("9.9", True, 2, "mgpu")
    text = json.dumps({**json.loads(write_agent_report(said)), **MORE})
    assert read_agent_report({"metadata": {"annotations": {AGENT_ANNOTATION: text}}}) == said
