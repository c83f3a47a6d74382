"""An extender for the tests of the scheduling loop."""

from collections.abc import Iterator

import pytest

from tests.playground.scheduling.fake_extender import FakeExtender


@pytest.fixture
def extender() -> Iterator[FakeExtender]:
    fake = FakeExtender()
    yield fake
    fake.close()
