"""The demo is a check, too: it must notice when a container does not get exactly its cards."""

import io

import pytest
from rich.console import Console

from mgpu.settings import load_settings
from playground import container_runtime
from playground.demo import Demo
from playground.samples import example
from tests.e2e.bench import Bench


def test_a_container_that_sees_other_cards_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = container_runtime.Edits({"NVIDIA_VISIBLE_DEVICES": "GPU-node-1-3"})
    monkeypatch.setattr("playground.container_runtime.resolve", lambda *_: wrong)
    output = io.StringIO()
    problems = Demo(bench.cluster, Console(file=output, width=200), load_settings()).run()
    assert any("share: container notebook must see NVIDIA_VISIBLE_DEVICES=GPU-node-1-0" in p for p in problems)
    assert "✗ share" in output.getvalue()


def test_an_example_that_is_refused_is_noticed(bench: Bench) -> None:
    bench.create({"metadata": {"name": "share"}, "spec": {"containers": [{"name": "c", "image": "busybox"}]}})
    demo = Demo(bench.cluster, Console(file=io.StringIO()), load_settings())
    demo.show_placed(example("share"))
    assert demo.problems == ["share was denied"]
