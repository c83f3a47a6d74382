"""Ports that two processes, or two parts of one, never get both."""

import socket
from collections.abc import Iterator

import pytest

from playground.processes import BLOCK, Ports


@pytest.fixture
def two() -> Iterator[tuple[Ports, Ports]]:
    """As two processes have them."""
    both = Ports(), Ports()
    yield both
    for ports in both:
        ports.close()


def test_no_port_is_given_twice(two: tuple[Ports, Ports]) -> None:
    given = [ports.free() for _ in range(2 * BLOCK) for ports in two]
    assert len(set(given)) == len(given)


def test_a_port_that_somebody_listens_at_is_not_given(two: tuple[Ports, Ports]) -> None:
    ports, _ = two
    following = ports.free() + 1
    with socket.create_server(("127.0.0.1", following)):
        assert ports.free() > following
