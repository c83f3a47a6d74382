"""The sharing configuration of a node, as a ConfigMap holds it."""

import tracemalloc
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.errors import BadObject
from mgpu.model.mps_config import config_of, read_config, write_config

SEED = """\
version: v1
flags:
  migStrategy: none
sharing:
  mps:
    failRequestsGreaterThanOne: true
    resources:
    - devices:
      - "0"
      memoryGB: 4
      name: nvidia.com/gpu
      rename: gpu-4gb
      replicas: 2
    - devices:
      - "0"
      memoryGB: 2
      name: nvidia.com/gpu
      rename: gpu-2gb
      replicas: 2
"""
SPECS = st.dictionaries(
    st.integers(0, 15), st.dictionaries(st.sampled_from(["1gb", "2gb", "10gb", "80gb"]), st.integers(0, 12), max_size=4)
)


def entry(**changed: Any) -> dict[str, Any]:
    return {"devices": ["0"], "memoryGB": 4, "name": "nvidia.com/gpu", "rename": "gpu-4gb", "replicas": 2} | changed


def config(*rows: Any, **changed: Any) -> str:
    found = {"version": "v1", "sharing": {"mps": {"resources": list(rows)}}, **changed}
    return yaml.safe_dump(found)


def problem(text: str) -> list[str]:
    with pytest.raises(BadObject) as error:
        read_config(text)
    return [str(p) for p in error.value.problems]


def test_the_seeds_config_map_is_read_as_it_stands() -> None:
    found = config_of({"default": SEED}, "n1")
    assert found == ("default", SEED)
    assert read_config(SEED) == {0: {"4gb": 2, "2gb": 2}}


def test_what_is_written_has_the_form_of_the_seed() -> None:
    written = yaml.safe_load(write_config({1: {"2gb": 1}, 0: {"4gb": 2, "2gb": 2, "8gb": 0}}))
    seed = yaml.safe_load(SEED)
    four, two = seed["sharing"]["mps"]["resources"]
    assert {**written, "sharing": {}} == {**seed, "sharing": {}}
    assert written["sharing"]["mps"]["failRequestsGreaterThanOne"] is True
    assert written["sharing"]["mps"]["resources"] == [two, four, {**two, "devices": ["1"], "replicas": 1}]


@given(SPECS)
def test_what_is_written_is_read_back_whatever_its_order(spec: dict[int, dict[str, int]]) -> None:
    text = write_config(spec)
    counts = {card: {name: n for name, n in names.items() if n} for card, names in spec.items()}
    assert read_config(text) == {card: names for card, names in counts.items() if names}
    turned = {card: dict(reversed(names.items())) for card, names in reversed(spec.items())}
    assert write_config(turned) == text


def test_nothing_shared_is_a_configuration_too() -> None:
    assert read_config(write_config({})) == {}
    assert read_config("version: v1") == {}


def test_cards_may_be_listed_together_and_entries_add_up() -> None:
    both = config(entry(devices=[0, "1"]), entry(replicas=1, rename="nvidia.com/gpu-4gb"))
    assert read_config(both) == {0: {"4gb": 3}, 1: {"4gb": 2}}


ROW = "sharing.mps.resources[0]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not YAML"),
        ("[" * 3000, "is not YAML"),
        ("- 1", "must be an object with version"),
        ("", "must be an object with version"),
        ("version: v2", "version: must be v1, not 'v2'"),
        ("sharing: {}", "version: must be v1, not None"),
        (config(sharing=3), "sharing: must be an object"),
        (config(sharing={"mps": [1]}), "sharing.mps: must be an object"),
        (config(sharing={"mps": {"resources": 3}}), "sharing.mps.resources: must be a list"),
        (config(flags={"migStrategy": "mixed"}), "flags.migStrategy: must be none"),
        (
            config(sharing={"mps": {"failRequestsGreaterThanOne": False}}),
            "sharing.mps.failRequestsGreaterThanOne: must be true",
        ),
        (config("x"), f"{ROW}: must be an object"),
        (config(entry(replicas=-1)), f"{ROW}.replicas: must be an integer of at least 1, not -1"),
        (config(entry(replicas=0)), f"{ROW}.replicas: must be"),
        (config(entry(replicas="2")), f"{ROW}.replicas: must be"),
        (config(entry(replicas=True)), f"{ROW}.replicas: must be"),
        (config(entry(memoryGB=0)), f"{ROW}.memoryGB: must be"),
        (config(entry(memoryGB=None)), f"{ROW}.memoryGB: must be"),
        (config(entry(memoryGB=10**6, rename="gpu-1000000gb")), f"{ROW}.memoryGB: 1000000 GiB is more"),
        (config(entry(rename="gpu-2gb")), f"{ROW}.rename: must be gpu-4gb, as memoryGB says, not 'gpu-2gb'"),
        (config(entry(rename=["gpu-4gb"])), f"{ROW}.rename: must be gpu-4gb"),
        (config(entry(name="nvidia.com/mig-1g.5gb")), f"{ROW}.name: must be nvidia.com/gpu"),
        (config(entry(devices="all")), f"{ROW}.devices: must be a list"),
        (config(entry(devices=[])), f"{ROW}.devices: must be a list"),
        (config(entry(devices=["0", "GPU-1"])), f"{ROW}.devices[1]: 'GPU-1' is not a card index"),
        (config(entry(devices=[-1])), f"{ROW}.devices[0]: -1 is not a card index"),
        (config(entry(devices=[True])), f"{ROW}.devices[0]: True is not a card index"),
        (config(entry(devices=[0, "0"])), f"{ROW}.devices[1]: card 0 is listed twice"),
        (config(entry(replicas=30), entry(replicas=20)), "sharing.mps.resources: card 0 has 50 shares"),
    ],
)
def test_what_is_wrong_is_named_with_its_path(text: str, said: str) -> None:
    assert any(line.startswith(f"configuration: {said}") for line in problem(text)), problem(text)


def test_everything_wrong_is_told_at_once() -> None:
    assert len(problem(config(entry(replicas=-1, rename="x"), entry(devices=[])))) == 3


def test_a_node_without_a_key_of_its_own_has_the_default() -> None:
    assert config_of({"default": "a", "n1": "b"}, "n1") == ("n1", "b")
    assert config_of({"default": "a", "n1": "b"}, "n2") == ("default", "a")
    assert config_of({"n1": "b"}, "n2") is None


def bomb(levels: int) -> str:
    """Aliases of aliases: each level is ten times as large as the one before."""
    rows = [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(["a0: &a0 [x,x,x,x,x,x,x,x,x,x]", *rows, f"version: *a{levels - 1}"])


HOSTILE = {
    "aliases": (bomb(9), "alias"),
    "merged aliases": ("a: &a {k: v}\nb: &b {<<: [*a, *a]}\nversion: {<<: [*b, *b]}", "alias"),
    "many values": (f"version: [{','.join(['1'] * 9_000)}]", "more than 8192 values"),
    "a long number": (f"version: {'9' * 50_000}", "more than 256 characters"),
    "a long text": (config() + " " * 65_536, "more than the 65536"),
    "deep": ("[" * 3_000, "more than 16 levels"),
    "a wide value": (f"version: [{','.join(['x' * 200] * 300)}]", "must be v1"),
}


@pytest.mark.parametrize(("text", "why"), HOSTILE.values(), ids=HOSTILE)
def test_a_configuration_that_is_made_to_be_expensive_is_refused_at_once(text: str, why: str) -> None:
    """A stolen token of the scheduler writes it, and every agent reads it."""
    (said,) = problem(text)
    assert why in said
    assert len(said) < 500


def test_aliases_of_aliases_take_little_memory() -> None:
    """Only these make more of a text than it is long."""
    tracemalloc.start()
    try:
        problem(bomb(9))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


def test_a_large_node_of_many_sizes_is_read() -> None:
    spec = {card: {f"{size}gb": 1 for size in range(1, 11)} for card in range(16)}
    assert read_config(write_config(spec)) == spec
