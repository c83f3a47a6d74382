"""The manifests name the resources and annotations of every dialect in the registry."""

import re
from itertools import chain
from pathlib import Path

import pytest
import yaml

from mgpu.dialects import registry
from mgpu.dialects.protocol import Dialect
from playground.managed_resources import MANAGED

MANIFESTS = Path(__file__).parents[2] / "manifests"
EXTENDERS = sorted(MANIFESTS.glob("components/*/kube-scheduler.yaml"))
CLAIMS = "mgpu.io/claims"
"""The resource with which components/dra marks pods with claims."""
DIALECTS = pytest.mark.parametrize("dialect", registry.ALL, ids=lambda dialect: dialect.NAME)


def managed_resources(path: Path) -> set[str]:
    """Return the names of all managedResources in the KubeSchedulerConfiguration of a ConfigMap or file."""
    return set(re.findall(r"\{name: (\S+), ignoredByScheduler: ", path.read_text()))


@DIALECTS
def test_managed_resources_include_each_resource_prefix_of_a_dialect(dialect: Dialect) -> None:
    assert EXTENDERS
    for managed in (set(MANAGED), *map(managed_resources, EXTENDERS)):
        missing = [prefix for prefix in dialect.RESOURCE_PREFIXES if not any(n.startswith(prefix) for n in managed)]
        assert not missing, "add the resources to managedResources and to playground.managed_resources.MANAGED"


def test_volcano_asks_its_own_plugins_for_victims_together_with_the_extender() -> None:
    """The plugins of a later tier decide alone about the pods that those of the earlier tiers protect."""
    volcano = yaml.safe_load((MANIFESTS / "components/volcano/volcano-scheduler.yaml").read_text())
    names = [plugin["name"] for plugin in volcano["tiers"][0]["plugins"]]
    assert names == ["priority", "gang", "conformance", "predicates", "extender"]


def test_volcano_calls_for_the_same_resources_as_kube_scheduler() -> None:
    volcano = yaml.safe_load((MANIFESTS / "components/volcano/volcano-scheduler.yaml").read_text())
    (arguments,) = (p["arguments"] for tier in volcano["tiers"] for p in tier["plugins"] if p["name"] == "extender")
    for path in EXTENDERS:
        # Volcano allocates claims by itself, and its extender does nothing for them (docs/batch.md).
        assert set(arguments["extender.managedResources"]) == managed_resources(path) - {CLAIMS}


@DIALECTS
def test_webhook_conditions_match_each_record_annotation_of_a_dialect(dialect: Dialect) -> None:
    text = (MANIFESTS / "base/webhook.yaml").read_text()
    patterns = re.findall(r"key[.]matches\(\s*'(.+?)'\)", text)
    assert patterns
    for pattern in patterns:
        # A record key is a whole annotation or the prefix of one.
        assert all(re.search(pattern, key) for key in dialect.RECORD_KEYS)


def texts_of_expressions(path: Path) -> set[str]:
    """Return all string literals in the CEL expressions of admission policies."""
    specs = [document["spec"] for document in yaml.safe_load_all(path.read_text())]
    rows = chain.from_iterable((*spec.get("variables", ()), *spec.get("validations", ())) for spec in specs)
    return set(chain.from_iterable(re.findall(r"'([^']+)'", row["expression"]) for row in rows))


@DIALECTS
@pytest.mark.parametrize("name", ["scheduler-policy.yaml", "agent-policy.yaml"])
def test_admission_policies_allow_the_record_annotations_of_a_dialect(dialect: Dialect, name: str) -> None:
    """The scheduler writes all annotations of a record, and the agent changes them after an exchange of records."""
    allowed = texts_of_expressions(MANIFESTS / "base" / name)
    assert not [key for key in dialect.RECORD_KEYS if not any(key.startswith(prefix) for prefix in allowed)]
