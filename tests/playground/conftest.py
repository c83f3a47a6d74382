"""The kubelet under test."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from playground.apiserver import ApiServer, User, running
from tests.playground.kubelet_bench import Bench


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []
    with (
        tempfile.TemporaryDirectory(prefix="k") as folder,
        running(ApiServer(tokens={"admin": User("admin", ("system:masters",))})) as url,
    ):

        def start(**config: Any) -> Bench:
            benches.append(Bench(url, Path(folder), **config))
            return benches[-1]

        yield start
        for made in benches:
            made.close()


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make()
