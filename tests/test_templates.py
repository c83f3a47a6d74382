"""The pods of examples/ can be written in the template of a Job or a Deployment, and those in templates are valid.

The API server validates a template before mgpu's webhook can complete the pods that are made from it. It denies a
container that requests an extended resource without an equal limit (`Limit must be set for non overcommitable
resources`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mgpu import dialects
from mgpu.model.gpu_requests import GpuRequest
from mgpu.model.pods import read_pod
from mgpu.settings import load_settings

Raw = dict[str, Any]
EXAMPLES = Path(__file__).parents[1] / "examples"
DENIED = ("denied",)
CLAIMED = ("claim",)
"""Its pods request their cards by ResourceClaims, in no vocabulary."""


def templates() -> Iterator[tuple[str, Raw]]:
    """Yield the name of each file with pods, and each pod in it or in its templates."""
    for path in sorted((*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("kueue/*.yaml"))):
        for raw in yaml.safe_load_all(path.read_text()):
            if raw.get("kind") == "Pod" and path.stem not in (*DENIED, *CLAIMED):
                yield path.stem, raw
            elif raw.get("kind") in ("Job", "Deployment"):
                yield path.stem, raw["spec"]["template"]


def without_limit(spec: Raw) -> list[str]:
    """Return the extended resources for which the API server denies the template."""
    found = []
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        resources = container.get("resources") or {}
        limits = resources.get("limits") or {}
        found += [k for k, v in (resources.get("requests") or {}).items() if "/" in k and limits.get(k) != v]
    return found


def read(name: str, raw: Raw) -> GpuRequest | None:
    annotations = raw.get("metadata", {}).get("annotations") or {}
    meta = {"name": name, "namespace": "default", "annotations": annotations}
    return dialects.read_request(read_pod({"metadata": meta, "spec": raw["spec"]}), load_settings())


def test_requests_without_limits_are_found() -> None:
    amounts = {"koordinator.sh/gpu": "50", "cpu": "1"}
    assert without_limit({"containers": [{"resources": {"requests": amounts}}]}) == ["koordinator.sh/gpu"]
    assert without_limit({"containers": [{"resources": {"limits": amounts}}]}) == []


TEMPLATES = list(templates())


@pytest.mark.parametrize(("name", "raw"), TEMPLATES, ids=[name for name, _ in TEMPLATES])
def test_example_is_valid_in_a_template(name: str, raw: Raw) -> None:
    assert without_limit(raw["spec"]) == []
    assert read(name, raw) is not None


def test_every_vocabulary_has_an_example() -> None:
    requests = [read(name, raw) for name, raw in TEMPLATES]
    assert {request.dialect for request in requests if request} == {dialect.NAME for dialect in dialects.ALL}
