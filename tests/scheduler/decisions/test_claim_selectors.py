"""Selectors of claims and DeviceClasses, evaluated for cards as kube-scheduler evaluates them for devices."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from mgpu.model.cards import Card
from scheduler.decisions import claim_selectors
from scheduler.decisions.claim_selectors import Selectors, Unsupported
from tests.builders import GIB

SMALL = Card(0, "GPU-a", "A100-SXM4-40GB", 40 * GIB, numa=0, minor=0)
LARGE = Card(1, "GPU-b", "H100-SXM5-80GB", 80 * GIB, numa=1, minor=7)
BARE = Card(2, "GPU-c", "", 80 * GIB)
CARDS = (SMALL, LARGE, BARE)

ATTRIBUTES = 'device.attributes["gpu.mgpu.io"]'
CAPACITY = 'device.capacity["gpu.mgpu.io"]'

SELECTED = {
    'device.driver == "gpu.mgpu.io"': [0, 1, 2],
    'device.driver == "gpu.nvidia.com"': [],
    "device.allowMultipleAllocations": [0, 1, 2],
    "device.allowMultipleAllocations == false": [],
    # attributes
    f'{ATTRIBUTES}.model == "H100-SXM5-80GB"': [1],
    f'{ATTRIBUTES}["numa"] == 1': [1],
    f"{ATTRIBUTES}.numa == 1.0": [1],
    f'{ATTRIBUTES}.numa == "1"': [],
    f"{ATTRIBUTES}.minor == 7": [1],
    f'{ATTRIBUTES}.uuid in ["GPU-a", "GPU-c"]': [0, 2],
    f"{ATTRIBUTES}.totalCores == 100 && {ATTRIBUTES}.totalMemory > 50 * 1024 * 1024 * 1024": [1, 2],
    f'cel.bind(gpu, {ATTRIBUTES}, gpu.numa == 0 && gpu.model.startsWith("A"))': [0],
    # attributes that a card does not have
    f"has({ATTRIBUTES}.model)": [0, 1],
    f'!has({ATTRIBUTES}.model) || {ATTRIBUTES}.model.contains("SXM4")': [0, 2],
    f'"model" in {ATTRIBUTES}': [0, 1],
    f'{ATTRIBUTES}.?model.orValue("other") == "other"': [2],
    'device.attributes[?"gpu.mgpu.io"].?numa.hasValue()': [0, 1],
    f'{ATTRIBUTES}.nothing == "x"': [],
    f'{ATTRIBUTES}.nothing == "x" || true': [0, 1, 2],
    # domains without attributes
    'device.attributes["gpu.nvidia.com"].?model.orValue("none") == "none"': [0, 1, 2],
    'has(device.attributes["gpu.nvidia.com"].model)': [],
    'device.attributes["gpu.nvidia.com"].model == "x"': [],
    'cel.bind(domain, "gpu.nvidia.com", has(device.attributes[domain].model)) || true': [0, 1, 2],
    '"gpu.nvidia.com" in device.attributes': [],
    '"gpu.mgpu.io" in device.attributes': [0, 1, 2],
    'device.attributes.exists(domain, domain != "gpu.mgpu.io")': [],
    "size(device.capacity) == 1": [0, 1, 2],
    # capacity
    f'{CAPACITY}.memory.compareTo(quantity("40Gi")) > 0': [1, 2],
    f'{CAPACITY}.memory.compareTo(quantity("40Gi")) == 0': [0],
    f'{CAPACITY}["memory"].isGreaterThan(quantity("42949672959"))': [0, 1, 2],
    f'{CAPACITY}.memory.isLessThan(quantity("80G"))': [0],
    f'{CAPACITY}.memory == quantity("40960Mi")': [0],
    f'{CAPACITY}.cores == quantity("100000m")': [0, 1, 2],
    f"{CAPACITY}.memory.asInteger() == {40 * GIB}": [0],
    f'{CAPACITY}.memory.sub(quantity("40Gi")).sign() == 0': [0],
    f"{CAPACITY}.memory.add(-{40 * GIB}).asInteger() == 0": [0],
    f'{CAPACITY}.memory.sub(1).add(quantity("1")).compareTo({CAPACITY}.memory) == 0': [0, 1, 2],
    f"{CAPACITY}.memory.asApproximateFloat() > 5e10": [1, 2],
    f"{CAPACITY}.memory.isInteger()": [0, 1, 2],
    'quantity("0.5").isInteger()': [],
    'isQuantity("1Gi") && !isQuantity("one")': [0, 1, 2],
    f'{CAPACITY}.memory.compareTo(quantity("forty")) > 0': [],
    f'{ATTRIBUTES}.uuid.isGreaterThan(quantity("1"))': [],
    # versions
    'semver("1.10.0").isGreaterThan(semver("1.9.9"))': [0, 1, 2],
    'semver("1.0.0-alpha.2").isLessThan(semver("1.0.0-alpha.10"))': [0, 1, 2],
    'semver("1.0.0-rc.1").isLessThan(semver("1.0.0"))': [0, 1, 2],
    'semver("1.0.0+a") == semver("1.0.0+b")': [0, 1, 2],
    'semver("v1.02", true) == semver("1.2.0") && semver("1.2.3").minor() == 2': [0, 1, 2],
    'isSemver("1.2.3") && !isSemver("1.2") && isSemver("1.2", true) && !isSemver("01.2.3")': [0, 1, 2],
    'semver("1.0.0").compareTo(quantity("1")) == 0': [],
    # texts, lists and macros
    f'{ATTRIBUTES}.uuid.lowerAscii().matches("^gpu-[ab]$")': [0, 1],
    f'{ATTRIBUTES}.uuid.split("-")[1] == "c" && {ATTRIBUTES}.uuid.substring(4) == "c"': [2],
    f'["A100", "H100"].exists(name, {ATTRIBUTES}.?model.orValue("").startsWith(name))': [0, 1],
    "[1, 2, 3].filter(i, i > 1).map(i, i * 2) == [4, 6]": [0, 1, 2],
    # results that are not Booleans
    f"{ATTRIBUTES}.numa": [],
}


@pytest.mark.parametrize("expression", SELECTED)
def test_excluded_leaves_the_cards_that_a_selector_selects(expression: str) -> None:
    excluded = Selectors().excluded([expression], CARDS)
    assert not isinstance(excluded, Unsupported), excluded
    assert [card.index for card in CARDS if card.index not in excluded] == SELECTED[expression]


def excluded(*expressions: str, card: Card = SMALL) -> str | None:
    found = Selectors().excluded(expressions, [card])
    assert not isinstance(found, Unsupported), found
    return found.get(card.index)


def unsupported(expression: str) -> str:
    found = Selectors().excluded([expression], CARDS)
    assert isinstance(found, Unsupported), found
    return found.reason


def test_card_must_fulfill_all_selectors() -> None:
    selectors = [f"{ATTRIBUTES}.numa == 1", f'{ATTRIBUTES}.uuid == "GPU-a"']
    assert excluded(*selectors) == 'selector device.attributes["gpu.mgpu.io"].numa == 1 is false'
    assert excluded(*selectors, card=LARGE) == 'selector device.attributes["gpu.mgpu.io"].uuid == "GPU-a" is false'
    assert Selectors().excluded([], CARDS) == {}


def test_error_of_a_card_is_the_reason_of_its_exclusion() -> None:
    found = excluded(f"{ATTRIBUTES}.numa == 1", card=BARE)
    assert found == 'selector device.attributes["gpu.mgpu.io"].numa == 1 fails: Key not found in map : "numa"'


def test_error_of_a_function_is_the_reason_of_an_exclusion() -> None:
    found = excluded('quantity("forty").sign() == 1')
    assert found == "selector quantity(\"forty\").sign() == 1 fails: 'forty' is not a quantity such as 50, 6k or 1Gi"


def test_reason_is_one_short_line_without_percent_signs() -> None:
    found = excluded(f'{ATTRIBUTES}.index % 2 == 1\n  || {ATTRIBUTES}.model == "{"x" * 500}"')
    assert found is not None
    assert found.startswith('selector device.attributes["gpu.mgpu.io"].index mod 2 == 1 || device.attributes')
    assert len(found) < 120


@pytest.mark.parametrize(
    "expression",
    [
        "device.driver ==",
        'device.driver.find("[a-z]+") == "gpu"',
        'ip("10.0.0.1").isLoopback()',
        "(" * 100 + "true" + ")" * 100,
    ],
)
def test_expression_that_does_not_compile_is_unsupported(expression: str) -> None:
    assert unsupported(expression).startswith("mgpu cannot compile the selector ")


def test_expression_that_is_longer_than_the_api_server_allows_is_unsupported() -> None:
    assert unsupported(f'device.driver != "{"x" * 10_240}"').endswith(" is too long")


def test_evaluation_with_too_many_iterations_is_unsupported() -> None:
    many = f"[{'1,' * 500}1]"
    assert "Iteration budget exceeded" in unsupported(f"{many}.all(x, {many}.all(y, x == y))")


def test_lookup_of_an_unknown_domain_beside_a_use_of_all_domains_is_unsupported() -> None:
    unsupported('!("a.io" in device.attributes) && has(device.attributes["a.io"].model)')


def test_domain_that_is_computed_is_unsupported() -> None:
    unsupported('has(device.attributes["gpu.nvidia" + ".com"].model)')


def test_device_in_a_list_is_supported() -> None:
    assert excluded('[device].all(d, d.driver == "gpu.mgpu.io")') is None


def test_changed_card_is_evaluated_again() -> None:
    selectors = Selectors()
    expression = f'{ATTRIBUTES}.model.startsWith("A100")'
    assert selectors.excluded([expression], [SMALL]) == {}
    assert selectors.excluded([expression], [SMALL]) == {}
    assert selectors.excluded([expression], [replace(SMALL, model="H100")]) != {}


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("device.driver == 'a' && device.allowMultipleAllocations", ()),
        (
            f'{ATTRIBUTES}.model == "A" && {ATTRIBUTES}["numa"] == 1 && {CAPACITY}.memory.sign() == 1',
            ("memory", "model", "numa"),
        ),
        ("has(device.attributes['gpu.mgpu.io'].uuid)", ("uuid",)),
        (f"{ATTRIBUTES}.?index.hasValue()", ("index",)),
        ('device.attributes[?"gpu.mgpu.io"].?numa.hasValue()', ("numa",)),
        (f"{ATTRIBUTES}.size() == 3", None),
        (f'{ATTRIBUTES}.exists(name, name == "numa")', None),
        (f'"uuid" in {ATTRIBUTES}', None),
        (f'{ATTRIBUTES}["uu" + "id"] == "GPU-a"', None),
        (f'cel.bind(gpu, {ATTRIBUTES}, gpu.uuid == "GPU-a")', None),
        ('[device].all(d, d.attributes["gpu.mgpu.io"].uuid == "GPU-a")', None),
    ],
)
def test_attributes_that_an_expression_reads(expression: str, names: tuple[str, ...] | None) -> None:
    assert claim_selectors._attributes(expression) == names


@pytest.mark.parametrize("expression", SELECTED)
def test_cards_with_equal_results_are_told_apart_from_the_others(expression: str) -> None:
    """The results of many other cards are cached before."""
    selectors = Selectors()
    selectors.excluded([expression], [replace(card, uuid=f"GPU-{i}", index=i) for i in range(9) for card in CARDS])
    found = selectors.excluded([expression], CARDS)
    assert not isinstance(found, Unsupported)
    assert [card.index for card in CARDS if card.index not in found] == SELECTED[expression]


def test_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_selectors, "_MAX_RESULTS", 5)
    monkeypatch.setattr(claim_selectors, "_MAX_CHARACTERS", 200)
    selectors = Selectors()
    for _ in range(2):
        for i in range(20):
            assert selectors.excluded([f"{ATTRIBUTES}.index < {i}"], CARDS) == {
                card.index: f'selector device.attributes["gpu.mgpu.io"].index < {i} is false'
                for card in CARDS
                if card.index >= i
            }
    assert len(selectors._results) <= 5
    assert sum(map(len, selectors._compiled)) <= 200


def test_several_threads_evaluate_at_once() -> None:
    selectors = Selectors()
    expressions = [f'{CAPACITY}.memory.compareTo(quantity("{i}Gi")) > 0' for i in range(100)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda expression: selectors.excluded([expression], CARDS), expressions * 4))
    assert [sorted(one) for one in found[:100]] == [sorted(one) for one in found[-100:]]  # type: ignore[arg-type]
    assert [len(one) for one in found[:100]] == [0] * 40 + [1] * 40 + [3] * 20  # type: ignore[arg-type]


def test_library_is_imported_only_for_the_first_selector() -> None:
    program = """
import sys
from mgpu.model.cards import Card
from scheduler.decisions.claim_selectors import Selectors
selectors = Selectors()
selectors.excluded([], [Card(0, "GPU-a", "A100", 1)])
assert not any(name.startswith("cel_expr_python") for name in sys.modules)
selectors.excluded(["true"], [Card(0, "GPU-a", "A100", 1)])
assert "cel_expr_python.cel" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
