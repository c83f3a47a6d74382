"""The pods of examples/, by the Python client and by kubectl."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes.client import ApiException

from playground.samples import EXAMPLES, example
from tests.e2e.bench import ASSUMED, Bench
from tests.waiting import until

RUN = ("share", "gpushare", "koordinator", "nvidia", "several-containers", "multi-gpu", "whole-cards")
SLICED = ("mig", "mps")
"""Run in test_slices.py, where cards are cut."""
NAMED = ("mtgpupod",)
"""Run in test_mtgpu_story.py."""
CLAIMED = ("claim",)
"""Run in test_claims.py, where claims are enabled."""
REFUSED = ("denied", "fits-nowhere")
Kubectl = Callable[..., Any]


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == {*RUN, *SLICED, *NAMED, *CLAIMED, *REFUSED}


def test_every_container_gets_exactly_its_cards(bench: Bench) -> None:
    for name in RUN:
        bench.create(example(name))
    for name in RUN:
        bench.exact(name)
    assert len(bench.sees("multi-gpu")["workers"]) == 2
    assert len(bench.sees("whole-cards")["simulate"]) == 2
    assert bench.sees("several-containers").keys() == {"prepare", "train", "evaluate"}
    assert bench.within_capacity()
    told = {"MGPU_CARDS": "0,1", "MGPU_CORE_PERCENT": "50", "MGPU_MEMORY_BYTES": str(8 << 30)}
    assert told.items() <= bench.environment("multi-gpu", "workers").items()


def test_the_denied_one_names_the_rule(bench: Bench) -> None:
    with pytest.raises(ApiException) as refused:
        bench.create(example("denied"))
    status = json.loads(refused.value.body or "")
    assert status["code"] == 422
    assert "above 100 must be a multiple of 100 (whole cards), not 120" in status["message"]
    assert bench.names() == set()


def test_what_fits_nowhere_waits_with_a_reason_per_node(bench: Bench) -> None:
    bench.create(example("fits-nowhere"))
    why = bench.waits("fits-nowhere")
    assert why.startswith("0/2 nodes are available")
    # The scheduler may not have received the deletion of an earlier test's pod, whose card then has less memory free.
    assert re.search(r"\(4 cards: .*\b[1-4] memory 120\.0 GiB short", why), why
    assert until(lambda: bench.events("fits-nowhere", "FailedScheduling")) == [why]


def test_kubectl_create_logs_describe_and_delete(bench: Bench, kubectl: Kubectl) -> None:
    assert kubectl("create", "-f", EXAMPLES / "share.yaml").stdout == "pod/share created\n"
    bench.runs("share")
    logs = kubectl("logs", "share").stdout
    assert f"NVIDIA_VISIBLE_DEVICES=GPU-{bench.pod('share').spec.node_name}-" in logs
    described = kubectl("describe", "pod", "share").stdout
    assert f"{ASSUMED}: true" in described
    until(lambda: "Successfully assigned default/share" in kubectl("describe", "pod", "share").stdout)
    assert kubectl("delete", "pod", "share", "--wait=true").returncode == 0
    assert bench.names() == set()


def test_kubectl_shows_the_rule_of_a_denial(kubectl: Kubectl) -> None:
    denied = kubectl("create", "-f", EXAMPLES / "denied.yaml")
    assert denied.returncode == 1
    assert "must be a multiple of 100 (whole cards), not 120" in denied.stderr


def test_kubectl_applies_a_reexported_pod_without_its_placement(bench: Bench, kubectl: Kubectl) -> None:
    pod = example("share")
    pod["metadata"]["annotations"] = {ASSUMED: "true", "vke.volcengine.com/gpu-index-container-notebook": "3"}
    bench.create(pod)
    bench.exact("share")
    assert bench.sees("share") != {"notebook": [3]}
    changed = kubectl("annotate", "pod", "share", "--overwrite", "vke.volcengine.com/gpu-index-container-notebook=3")
    assert changed.returncode == 1
    bench.exact("share")
