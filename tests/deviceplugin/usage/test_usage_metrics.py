"""Use is served with bounded numbers of series, and what is not known is not served."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from deviceplugin.usage.container_use import CardUsage, ContainerUse, Usage
from deviceplugin.usage.usage_metrics import UsageMetrics
from mgpu.model.usage_problems import UsageProblem
from tests.builders import GIB, cards

GPUS = cards(2)
ON_CARD = {"node": "n1", "index": "0", "uuid": GPUS[0].uuid, "model": GPUS[0].model}


def served(usage: Usage, most: int = 512) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    agent: Any = SimpleNamespace(node="n1", usage=lambda: usage)
    registry = CollectorRegistry()
    registry.register(UsageMetrics(lambda: agent, most))
    return {(s.name, frozenset(s.labels.items())): s.value for m in registry.collect() for s in m.samples}


def of(pod: str) -> dict[str, str]:
    return {
        "node": "n1",
        "namespace": "ns",
        "pod": pod,
        "container": "c",
        "uuid": GPUS[0].uuid,
        "index": "0",
    }


def container(pod: str, memory: int | None = GIB, sm: float | None = 0.5, limit: int | None = 4 * GIB) -> ContainerUse:
    return ContainerUse(f"uid-{pod}", "ns", pod, "c", GPUS[0], memory, sm, limit)


def test_cards_and_containers_are_served_with_their_labels() -> None:
    found = served(Usage((CardUsage(GPUS[0], 9 * GIB, 0.7, 2, GIB), CardUsage(GPUS[1])), (container("p"),)))
    assert found == {
        ("mgpu_card_memory_in_use_bytes", frozenset(ON_CARD.items())): 9 * GIB,
        ("mgpu_card_sm_utilization_ratio", frozenset(ON_CARD.items())): 0.7,
        ("mgpu_card_foreign_processes", frozenset(ON_CARD.items())): 2,
        ("mgpu_card_foreign_memory_bytes", frozenset(ON_CARD.items())): GIB,
        ("mgpu_container_memory_used_bytes", frozenset(of("p").items())): GIB,
        ("mgpu_container_memory_limit_bytes", frozenset(of("p").items())): 4 * GIB,
        ("mgpu_container_sm_utilization_ratio", frozenset(of("p").items())): 0.5,
        ("mgpu_usage_series_left_out", frozenset()): 0,
    }


def test_claims_are_served_with_their_labels_and_are_limited() -> None:
    usage = Usage((), tuple(replace(container(name), claims=(f"of-{name}",)) for name in ("p", "q")))
    labels = {"node": "n1", "namespace": "ns", "claim": "of-p", "uuid": GPUS[0].uuid, "index": "0"}
    found = {key: value for key, value in served(usage, 1).items() if not key[0].startswith("mgpu_container_")}
    assert found == {
        ("mgpu_claim_memory_used_bytes", frozenset(labels.items())): GIB,
        ("mgpu_claim_sm_utilization_ratio", frozenset(labels.items())): 0.5,
        ("mgpu_usage_series_left_out", frozenset()): 2,
    }


def test_unknown_use_has_no_series_and_a_reason() -> None:
    found = served(Usage((), (container("p", None, None, None),), UsageProblem.NO_HOST_PIDS))
    assert found == {
        ("mgpu_usage_problem", frozenset({("reason", "no-host-pids")})): 1,
        ("mgpu_usage_series_left_out", frozenset()): 0,
    }


def test_series_of_containers_are_limited_and_the_rest_is_counted() -> None:
    usage = Usage((CardUsage(GPUS[0], GIB),), tuple(container(f"p{n}") for n in range(5)))
    found = served(usage, 2)
    pods = {dict(labels)["pod"] for name, labels in found if name.startswith("mgpu_container_")}
    assert pods == {"p0", "p1"}
    assert found["mgpu_usage_series_left_out", frozenset()] == 3
    none = served(usage, 0)
    assert not any(name.startswith("mgpu_container_") for name, _ in none)
    assert ("mgpu_card_memory_in_use_bytes", frozenset(ON_CARD.items())) in none
