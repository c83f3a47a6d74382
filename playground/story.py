"""The part of `mgpu demo` that runs MtgpuPods on one node with two cards, command by command (examples/two-cards).

Each step creates or deletes an MtgpuPod, and then compares the cards that are in use with those that the step expects
(`Step.picture`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from mgpu.kube import ApiError
from mgpu.model.quantities import format_core
from mgpu.presentation.card_map import card_map
from mgpu.presentation.card_views import NodeView
from playground.cluster import Cluster
from playground.containers import VISIBLE, differences
from playground.nodes import TWO_CARDS
from playground.playground_command import show
from playground.samples import EXAMPLES, Json, Samples, example

_SECONDS = 30.0
_FOLDER = "two-cards"

Picture = Mapping[str, Mapping[str, int]]
"""For each GPUID that has a card, the `gpu_request` of each of its pods, in thousandths of the card."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command of the story.

    Attributes:
        pod: The name of the MtgpuPod, and of its file in examples/two-cards.
        why: What the MtgpuPod does in this step, as the end of a sentence that begins with its name.
        picture: The cards of the node that are in use after the command.
        deletes: Whether the command deletes the MtgpuPod, instead of creating it.
    """

    pod: str
    why: str
    picture: Picture
    deletes: bool = False

    @property
    def command(self) -> str:
        file = f"{EXAMPLES.name}/{_FOLDER}/{self.pod}.yaml"
        return f"kubectl delete mtgp {self.pod}" if self.deletes else f"kubectl create -f {file}"


STORY = (
    Step("pod1", "wants a card of its own, so it makes up a GPUID: zxcvb", {"zxcvb": {"pod1": 200}}),
    Step(
        "pod2",
        "does not want to share with pod1, so it makes up another GPUID: qwert",
        {"zxcvb": {"pod1": 200}, "qwert": {"pod2": 300}},
    ),
    Step(
        "pod3",
        "wants to share with pod1, so it has the same GPUID: zxcvb",
        {"zxcvb": {"pod1": 200, "pod3": 400}, "qwert": {"pod2": 300}},
    ),
    Step(
        "pod2",
        "is deleted, and no other pod has the GPUID qwert, so its card is free",
        {"zxcvb": {"pod1": 200, "pod3": 400}},
        deletes=True,
    ),
    Step(
        "pod4",
        "wants a card of its own, so it makes up a GPUID: asdfg",
        {"zxcvb": {"pod1": 200, "pod3": 400}, "asdfg": {"pod4": 500}},
    ),
)


class Story:
    """Runs the story once, on the node `TWO_CARDS` of the cluster."""

    def __init__(self, cluster: Cluster, samples: Samples, console: Console) -> None:
        self._cluster = cluster
        self._samples = samples
        self._console = console

    def run(self, steps: Sequence[Step] = STORY) -> list[str]:
        """Run the steps until one fails. Return the problems of that step, or an empty list if none fails."""
        for step in steps:
            started = time.monotonic()
            try:
                problems = self._take(step)
            except ApiError as error:
                problems = [f"{step.pod}: {error.message}"]
            self._show(step, time.monotonic() - started, problems)
            if problems:
                return problems
        return []

    def _take(self, step: Step) -> list[str]:
        """Run the command of a step, wait for its effect, and return the problems."""
        if step.deletes:
            self._samples.delete_mtgpupod(step.pod)
            # Until the agent knows that the containers have ended, it reports the card as used by a deleted pod. It may
            # report this later than the API server deletes the pod, so the card can look idle for a moment before.
            if not _wait(lambda: not self._differences(step)):
                return [f"{step.pod} is deleted, but its card is still in use", *self._differences(step)]
            return []
        self._samples.create_mtgpupod(example(f"{_FOLDER}/{step.pod}"))
        if not _wait(lambda: _status(self._samples.mtgpupod(step.pod)).get("phase") == "Running"):
            rows = _status(self._samples.mtgpupod(step.pod)).get("conditions") or ()
            conditions = "; ".join(f"{r['type']} {r['status']}: {r.get('message', '')}" for r in rows)
            return [f"{step.pod} does not run: {conditions or 'it has no conditions'}"]
        return self._differences(step)

    def _differences(self, step: Step) -> list[str]:
        """Return how the cards in use differ from the step's picture, and which containers do not see their card."""
        node = self._node()
        actual, expected = _cards(node), sorted(step.picture.items(), key=str)
        problems = []
        if actual != expected:
            problems.append(f"{TWO_CARDS} has {_words(actual)}; it should have {_words(expected)}")
        uuids = {card.state.gpuid: card.state.card.uuid for card in node.cards}
        for gpuid, pod in ((gpuid, pod) for gpuid, pods in step.picture.items() for pod in pods):
            environments = self._environments(pod)
            visible = dict.fromkeys(environments, uuids.get(gpuid, "no card"))
            problems += [f"{pod}: {problem}" for problem in differences(visible, environments)]
            problems += [] if environments else [f"{pod}: none of its containers runs"]
        return problems

    def _environments(self, pod: str) -> dict[str, Mapping[str, str]]:
        """Return the environment of each running container of a pod, by the name of the container."""
        found = self._cluster.kubelets[TWO_CARDS].runtime.containers()
        return {c.name: c.env for c in found if c.running and (c.namespace, c.pod) == ("default", pod)}

    def _node(self) -> NodeView:
        return next(node for node in self._samples.overview().nodes if node.name == TWO_CARDS)

    def _show(self, step: Step, seconds: float, problems: Sequence[str]) -> None:
        """Print the command of a step with its result, and the cards of the node."""
        visible = sorted({env.get(VISIBLE, "no card") for env in self._environments(step.pod).values()})
        rows = {"why": f"{step.pod} {step.why}", "took": f"{seconds:.1f} s"}
        if visible:
            rows["sees"] = f"{VISIBLE}={', '.join(visible)}"
        if problems:
            rows["wrong"] = "; ".join(problems)
        show(self._console, f"$ {step.command}", rows, good=not problems)
        self._console.print(card_map([self._node()]), crop=False)


def _cards(node: NodeView) -> list[tuple[str, Mapping[str, int]]]:
    """Return the GPUID and the pods of each card in use.

    The order does not depend on the cards, because a GPUID may get either card.
    """
    cards = (
        (card.state.gpuid, {use.pod.rpartition("/")[2]: use.core for use in card.uses})
        for card in node.cards
        if not card.state.idle
    )
    return sorted(cards, key=str)


def _wait(reached: Callable[[], bool]) -> bool:
    """Wait until `reached` returns true, for at most `_SECONDS`. Return whether it did."""
    deadline = time.monotonic() + _SECONDS
    while not (found := reached()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _status(raw: Json) -> Json:
    return raw.get("status") or {}


def _words(cards: Sequence[tuple[str, Mapping[str, int]]]) -> str:
    """Return a description such as `zxcvb: pod1 20%, pod3 40%; qwert: pod2 30%`."""
    pods = {gpuid: ", ".join(f"{pod} {format_core(core)}" for pod, core in uses.items()) for gpuid, uses in cards}
    return "; ".join(f"{gpuid or 'a card without GPUID'}: {text}" for gpuid, text in pods.items()) or "idle cards"
