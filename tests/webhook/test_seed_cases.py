"""The eight invalid pods of the specification ("Webhook Admission"): each is denied by its rule."""

from typing import Any

import pytest

from mgpu.settings import load_settings
from tests.builders import CORE, MEMORY, container, pod
from tests.mgpu.serving.reviews import patch_of, patched, review
from webhook.admission import make_app

MULTIPLE = "vke.volcengine.com/container-multiple-gpu"
CORE_PATH = f"spec.containers[0].resources.requests[{CORE}]"
MEMORY_PATH = f"spec.containers[0].resources.requests[{MEMORY}]"
LIST_PATH = f"metadata.annotations[{MULTIPLE}]"


def normal(**amounts: str) -> dict[str, Any]:
    """Return a container with requests only, as in the specification."""
    requests = {{"core": CORE, "memory": MEMORY}[name]: amount for name, amount in amounts.items()}
    return pod("normal-mgpu-pod", {"name": "c", "resources": {"requests": requests}})


def multiple(entries: str, core: str) -> dict[str, Any]:
    return pod("multiple-mgpu-pod", container("c", core, "6k"), annotations={MULTIPLE: entries})


SEED = {
    "normal 1: core is not positive": (normal(core="-20", memory="6k"), [(CORE_PATH, "must be greater than 0")]),
    "normal 2, whose example breaks rule 3": (
        normal(core="120", memory="128"),
        [(CORE_PATH, "above 100 must be a multiple of 100")],
    ),
    "normal 2, by its text: too little memory for a share": (
        normal(core="20", memory="128"),
        [(MEMORY_PATH, "must be at least 256 (MiB)")],
    ),
    "normal 3: more than a card, not whole cards": (
        normal(core="120"),
        [(CORE_PATH, "above 100 must be a multiple of 100")],
    ),
    "normal 4: whole cards with memory": (
        normal(core="200", memory="6k"),
        [(MEMORY_PATH, "must not be set for whole cards")],
    ),
    "multiple 1: two entries, one container (and 200 is not divisible by 3)": (
        multiple("3,2", "200"),
        [(LIST_PATH, "2 entries, 1 container"), (CORE_PATH, "must be divisible by the number of cards")],
    ),
    "multiple 2: a negative entry (and one too many)": (
        multiple("-1,2", "200"),
        [(LIST_PATH, "entry 0 must be an integer of at least 0, not '-1'"), (LIST_PATH, "2 entries, 1 container")],
    ),
    "multiple 3: whole cards with memory": (
        multiple("2", "200"),
        [(MEMORY_PATH, "must not be set for whole cards")],
    ),
    "multiple 4: core does not divide": (
        multiple("3", "130"),
        [(CORE_PATH, "must be divisible by the number of cards: 130 over 3")],
    ),
}


@pytest.mark.parametrize(("raw", "rules"), SEED.values(), ids=SEED)
def test_invalid_pods_of_the_specification_are_denied_with_the_rules(raw: Any, rules: list[tuple[str, str]]) -> None:
    client = make_app(load_settings()).test_client()
    mutated: Any = client.post("/mutate", json=review(raw)).json
    assert mutated["response"]["allowed"]
    answer: Any = client.post("/validate", json=review(patched(raw, patch_of(mutated)))).json
    assert not answer["response"]["allowed"]
    causes = answer["response"]["status"]["details"]["causes"]
    assert [cause["field"] for cause in causes] == [field for field, _ in rules]
    assert all(rule in cause["message"] for cause, (_, rule) in zip(causes, rules, strict=True))
    assert all(rule in answer["response"]["status"]["message"] for _, rule in rules)
