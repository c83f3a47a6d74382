"""The admission of hostile pods costs little more than that of an ordinary pod of the same size."""

from functools import cache
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model import budget
from mgpu.settings import load_settings
from tests.examples import examples
from tests.fuzz import hostile
from tests.fuzz.cost import LARGE, Cost, cost, least
from tests.fuzz.cost import in_proportion as proportion
from tests.mgpu.serving.reviews import review
from webhook.admission import make_app

pytestmark = pytest.mark.fuzz
CLIENT = make_app(load_settings()).test_client()
PATHS = ("/mutate", "/validate")
_MOST_OF_TIME, _MOST_OF_MEMORY, _MOST_ANSWERED = 15, 6, 3
"""Times an ordinary pod's, which has six times fewer containers in as many bytes; the answer: times what was sent.
 fb6a9e7 took 300 times as long for slices of 0.1 MiB."""


def sent(path: str, tree: Any) -> tuple[int, int]:
    """The status and the length of the answer."""
    answer = CLIENT.post(path, data=orjson.dumps(tree), content_type="application/json")
    return answer.status_code, len(answer.get_data())


def cost_of(path: str, tree: Any) -> Cost:
    return cost(lambda: sent(path, tree))


@cache
def ordinary(path: str, size: int) -> Cost:
    return cost_of(path, review(hostile.ordinary(size)))


def in_proportion(path: str, tree: Any) -> int:
    """Compare the cost with that of an ordinary pod of the same size, rounded up to a multiple of LARGE.

    Return the length of the answer.
    """
    size = -(-len(orjson.dumps(tree["request"]["object"])) // LARGE) * LARGE
    answers = []
    proportion(lambda: answers.append(sent(path, tree)), ordinary(path, size), _MOST_OF_TIME, _MOST_OF_MEMORY)
    status, length = answers[-1]
    assert status == 200
    return length


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", hostile.PODS)
def test_hostile_pod_costs_little_more_than_an_ordinary_one_of_its_size(name: str, path: str) -> None:
    tree = review(hostile.PODS[name](LARGE))
    assert in_proportion(path, tree) <= _MOST_ANSWERED * len(orjson.dumps(tree))


@pytest.mark.parametrize("name", ["ordinary", *hostile.PODS])
def test_update_of_a_hostile_pod_costs_little_more_than_one_of_an_ordinary_pod(name: str) -> None:
    pods = {**hostile.PODS, "ordinary": hostile.ordinary}
    old = pods[name](LARGE // 2)
    tree = review(hostile.changed(old, 30 * budget.MAX_ANNOTATIONS), "UPDATE", old=old)
    assert in_proportion("/validate", tree) <= _MOST_ANSWERED * len(orjson.dumps(tree))


@given(st.sampled_from(PATHS), st.lists(st.sampled_from(sorted(hostile.PODS)), min_size=2, max_size=4, unique=True))
@examples(4)
def test_property_mixture_of_hostile_pods_costs_little_more_than_an_ordinary_one(path: str, names: list[str]) -> None:
    mixture = hostile.mixed(*(hostile.PODS[name](LARGE // len(names)) for name in names))
    in_proportion(path, review(mixture))


@pytest.mark.parametrize("path", PATHS)
def test_ordinary_pod_of_twice_the_size_costs_at_most_two_and_a_half_times_as_much(path: str) -> None:
    small, large = ordinary(path, LARGE // 4), ordinary(path, LARGE // 2)
    for _ in range(4):  # another process may have delayed one of the two measurements
        if large.seconds <= 2.5 * small.seconds:
            break
        small = least(small, cost_of(path, review(hostile.ordinary(LARGE // 4))))
        large = least(large, cost_of(path, review(hostile.ordinary(LARGE // 2))))
    assert large.seconds <= 2.5 * small.seconds
    assert large.peak <= 2.5 * small.peak
