"""The seed's figure (seeds/k8s-gpu-sharing.md), step by step: what is typed, and the node's two cards afterwards."""

import io
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from mgpu.dialects.mtgpu import parse_milli, read_mtgpupod
from playground.cluster import Cluster
from playground.samples import example
from playground.story import STORY, Story
from tests.e2e.bench import Bench
from tests.e2e.clusters import patient
from tests.e2e.mtgpu_bench import MTGPUPODS, OURS, STOCK, Named, find_kubectl, gone, limits, mtgpupod
from tests.waiting import until

FIGURE = """
create pod1 0.2 zxcvb │ zxcvb: pod1 0.2
create pod2 0.3 qwert │ qwert: pod2 0.3 │ zxcvb: pod1 0.2
create pod3 0.4 zxcvb │ qwert: pod2 0.3 │ zxcvb: pod1 0.2, pod3 0.4
delete pod2           │ zxcvb: pod1 0.2, pod3 0.4
create pod4 0.5 asdfg │ asdfg: pod4 0.5 │ zxcvb: pod1 0.2, pod3 0.4
"""
"""What is typed │ each card in use. The other is free; which card is which is not said."""

Step = tuple[list[str], dict[str, dict[str, str]]]
Kubectl = Callable[..., str]
Typed = Callable[[list[str], str], None]
"""Does what a line of the figure says, on a node."""


def steps() -> list[Step]:
    """(what is typed, GPUID → pod → request)."""
    found = []
    for line in FIGURE.strip().splitlines():
        typed, *cards = (part.strip() for part in line.split("│"))
        picture = {}
        for gpuid, _, pods in (card.partition(": ") for card in cards):
            picture[gpuid] = dict(pod.split(" ") for pod in pods.split(", "))
        found.append((typed.split(), picture))
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with patient([OURS, STOCK]) as made:
        yield made


@pytest.fixture
def pods(bench: Bench) -> Iterator[Named]:
    """Starts and ends with nothing."""
    made = Named(bench)
    yield made
    made.clear()


@pytest.fixture
def kubectl(cluster: Cluster, tmp_path: Path) -> Kubectl:
    """Runs real kubectl as the administrator; its output."""
    found = find_kubectl()
    if not found:
        pytest.skip("there is no kubectl on this machine")
    environ = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(tmp_path)}

    def run(*words: str, given: str = "") -> str:
        done = subprocess.run(
            [found, *words], input=given, env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def typed(request: pytest.FixtureRequest, pods: Named, by: str) -> Typed:
    """By calls of the API as kubectl makes them, or by kubectl itself."""
    if by == "kubectl":
        kubectl: Kubectl = request.getfixturevalue("kubectl")

        def by_kubectl(words: list[str], node: str) -> None:
            if words[0] == "delete":
                assert kubectl("delete", "mtgp", words[1]).startswith(f'mtgpupod.lsalab.nthu "{words[1]}" deleted')
            else:
                kubectl("create", "-f", "-", given=yaml.safe_dump(_manifest(words, node)))

        return by_kubectl

    def by_api(words: list[str], node: str) -> None:
        if words[0] == "delete":
            pods.delete(words[1])
        else:
            pods.api.create(MTGPUPODS, _manifest(words, node))

    return by_api


def _manifest(words: list[str], node: str) -> dict[str, object]:
    _, name, request, gpuid = words
    return mtgpupod(name, gpuid, request, node)


@pytest.mark.parametrize(("node", "by"), [(OURS.name, "kubectl"), (STOCK.name, "api")])
def test_the_seeds_figure(pods: Named, typed: Typed, node: str) -> None:
    where: dict[str, str] = {}
    for words, picture in steps():
        typed(words, node)
        if words[0] == "create":
            where[words[1]] = pods.runs(words[1])
        wanted = [
            (gpuid, set(on), sum(round(100 * float(r)) for r in on.values())) for gpuid, on in sorted(picture.items())
        ]
        until(lambda wanted=wanted: pods.cards(node) == wanted)  # type: ignore[misc]
        cards, account = pods.inspect(node)
        assert {c["gpuid"]: 100 - c["core"]["used"] for c in cards if c["gpuid"]} == {
            row["gpuid"]: row["core"] for row in account["gpuids"]
        }
        assert account["free"] == 2 - len(picture)
        uuids = {card["gpuid"]: card["uuid"] for card in cards}
        for gpuid, on in picture.items():
            for pod in on:
                # Nobody is ever moved: what it saw when it came is what it sees now.
                assert where[pod] == pods.runs(pod) == uuids[gpuid]
        assert set(pods.occupying()) == {f"mtgpupod-occupypod-{node}-{gpuid}" for gpuid in picture}
    first = [
        "2",
        *(f"default/{pod} {request} 1 {1 << 30}" for pod, request in (("pod1", "0.2"), ("pod3", "0.4"))),
    ]
    until(lambda: limits(pods, node, where["pod1"]) == first)
    until(lambda: len(limits(pods, node, where["pod4"])) == 2)


def test_the_examples_are_the_figure(pods: Named) -> None:
    for words in (words for words, _ in steps() if words[0] == "create"):
        said = read_mtgpupod(example(f"two-cards/{words[1]}"))
        assert (said.name, said.node, said.gpuid, said.request) == (
            words[1],
            OURS.name,
            words[3],
            parse_milli(words[2]),
        )
    pods.api.create(MTGPUPODS, example("mtgpupod"))
    pods.runs("mtgpupod")


def test_kubectl_shows_what_there_is_and_why_one_waits(pods: Named, kubectl: Kubectl) -> None:
    for name, gpuid, request in (("pod1", "zxcvb", "0.6"), ("pod2", "zxcvb", "0.5")):
        pods.create(name, gpuid, request)
    pods.runs("pod1")
    pods.waits("pod2", "ResourceExceeded")
    header, first, second = kubectl("get", "mtgp").splitlines()
    assert header.split() == ["NAME", "PHASE", "GPUID", "REQUEST", "NODE", "REASON", "AGE"]
    assert first.split()[:-1] == ["pod1", "Running", "zxcvb", "0.6", OURS.name, "Bound"]
    assert second.split()[:-1] == ["pod2", "Pending", "zxcvb", "0.5", OURS.name, "ResourceExceeded"]
    wide = kubectl("get", "mtgp", "pod1", "-o", "wide").splitlines()[1]
    assert f"GPU-{OURS.name}-" in wide
    described = kubectl("describe", "mtgp", "pod2")
    assert "ResourceExceeded" in described
    until(
        lambda: "Events:" in (text := kubectl("describe", "mtgp", "pod2")) and "<none>" not in text.split("Events:")[1]
    )


@pytest.mark.parametrize("cascade", ["background", "foreground", "orphan"])
def test_kubectl_delete_leaves_nothing(pods: Named, kubectl: Kubectl, cascade: str) -> None:
    pods.create("pod1", "zxcvb", "0.2")
    pods.runs("pod1")
    kubectl("delete", "mtgp", "pod1", f"--cascade={cascade}", "--timeout=40s")
    assert gone(pods, f"{MTGPUPODS}/pod1")
    until(pods.left_nothing)


def test_the_demo_tells_the_story_and_notices_another_one(pods: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    story = Story(pods.bench.cluster, pods.bench.samples, Console(file=output, width=120))
    assert story.run() == []
    for words, _ in steps():
        assert words[1] in output.getvalue()
    assert "✗" not in output.getvalue()
    assert [*STORY[-1].picture] == ["zxcvb", "asdfg"]
    pods.delete("pod4")
    wrong = replace(STORY[-1], picture={"zxcvb": {"pod1": 200}, "asdfg": {"pod4": 500}})
    (problem,) = story.run([wrong])
    assert problem.endswith("it should have asdfg: pod4 50%; zxcvb: pod1 20%")
    assert "✗ $ kubectl create -f examples/two-cards/pod4.yaml" in output.getvalue()
    pods.delete("pod4")
    monkeypatch.setattr("playground.container_runtime.own_environment", lambda *_: {"NVIDIA_VISIBLE_DEVICES": "all"})
    (problem,) = story.run([STORY[-1]])
    assert "pod4: container train must see NVIDIA_VISIBLE_DEVICES=GPU-mtgpu-1-" in problem
