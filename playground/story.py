"""The seed's story of one node with two cards (seeds/k8s-gpu-sharing.md), each step as a user types it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from mgpu.cli.picture import card_map
from mgpu.cli.views import NodeView
from mgpu.kube import ApiError
from mgpu.model.quantities import format_core
from playground import explain
from playground.cluster import Cluster
from playground.command import show
from playground.nodes import TWO_CARDS
from playground.samples import EXAMPLES, Json, Samples, example

_SECONDS = 30.0
_FOLDER = "two-cards"

Card = tuple[str, Mapping[str, int]]
"""(GPUID, the pods on its card, each with its gpu_request in milli)."""


@dataclass(frozen=True, slots=True)
class Step:
    """picture: the node afterwards, GPUID → as `Card`."""

    pod: str
    why: str
    picture: Mapping[str, Mapping[str, int]]
    deletes: bool = False

    @property
    def command(self) -> str:
        file = f"{EXAMPLES.name}/{_FOLDER}/{self.pod}.yaml"
        return f"kubectl delete mtgp {self.pod}" if self.deletes else f"kubectl create -f {file}"


STORY = (
    Step("pod1", "wants a card of its own, so it makes up a GPUID: zxcvb", {"zxcvb": {"pod1": 200}}),
    Step("pod2", "does not want to share with pod1: qwert", {"zxcvb": {"pod1": 200}, "qwert": {"pod2": 300}}),
    Step("pod3", "wants to share with pod1: zxcvb", {"zxcvb": {"pod1": 200, "pod3": 400}, "qwert": {"pod2": 300}}),
    Step("pod2", "ends, and with it qwert: its card is free", {"zxcvb": {"pod1": 200, "pod3": 400}}, deletes=True),
    Step("pod4", "wants a card of its own: asdfg", {"zxcvb": {"pod1": 200, "pod3": 400}, "asdfg": {"pod4": 500}}),
)


def picture(node: NodeView) -> list[Card]:
    """The cards that anybody holds, up to their numbering, as `mgpu inspect` has them; "" where there is no GPUID."""
    cards = (
        (card.state.gpuid, {use.pod.rpartition("/")[2]: use.core for use in card.uses})
        for card in node.cards
        if not card.state.idle
    )
    return sorted(cards, key=str)


class Story:
    """Runs once, on the node `TWO_CARDS` of the cluster."""

    def __init__(self, cluster: Cluster, samples: Samples, console: Console) -> None:
        self._cluster, self._samples, self._console = cluster, samples, console

    def run(self, steps: Sequence[Step] = STORY) -> list[str]:
        """What did not go as it must; a step that fails is the last one."""
        for step in steps:
            started = time.monotonic()
            try:
                problems = self._take(step)
            except ApiError as error:
                problems = [f"{step.pod}: {error.message}"]
            self._tell(step, time.monotonic() - started, problems)
            if problems:
                return problems
        return []

    def _take(self, step: Step) -> list[str]:
        if step.deletes:
            self._samples.delete_mtgpupod(step.pod)
            gone = self._wait(lambda: set(step.picture) == {gpuid for gpuid, _ in picture(self._node())})
            left = [] if gone else [f"{step.pod} is deleted, and its card is still kept"]
        else:
            self._samples.create_mtgpupod(example(f"{_FOLDER}/{step.pod}"))
            runs = self._wait(lambda: _status(self._samples.mtgpupod(step.pod)).get("phase") == "Running")
            left = [] if runs else [f"{step.pod} does not run: {self._why(step.pod)}"]
        return left or self._differences(step)

    def _differences(self, step: Step) -> list[str]:
        """Between the picture that must be, the one that there is, and what the containers see."""
        node = self._node()
        shown, wanted = picture(node), sorted(step.picture.items(), key=str)
        problems = [] if shown == wanted else [f"{TWO_CARDS} has {_words(shown)}; it should have {_words(wanted)}"]
        uuids = {card.state.gpuid: card.state.card.uuid for card in node.cards}
        for gpuid, pods in step.picture.items():
            for pod in pods:
                seen = self._seen(pod)
                cards = dict.fromkeys(seen, uuids.get(gpuid, "no card"))
                problems += [f"{pod}: {problem}" for problem in explain.differences(cards, seen)]
                problems += [] if seen else [f"{pod}: no container of it runs"]
        return problems

    def _seen(self, pod: str) -> dict[str, Mapping[str, str]]:
        """Container → its environment, of those that run."""
        found = self._cluster.kubelets[TWO_CARDS].runtime.containers()
        return {c.name: c.env for c in found if c.running and (c.namespace, c.pod) == ("default", pod)}

    def _node(self) -> NodeView:
        return next(node for node in self._samples.overview().nodes if node.name == TWO_CARDS)

    def _why(self, pod: str) -> str:
        rows = _status(self._samples.mtgpupod(pod)).get("conditions") or ()
        return "; ".join(f"{r['type']} {r['status']}: {r.get('message', '')}" for r in rows) or "nothing was said"

    @staticmethod
    def _wait(reached: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + _SECONDS
        while not (found := reached()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _tell(self, step: Step, took: float, problems: Sequence[str]) -> None:
        sees = sorted({env.get(explain.VISIBLE, "no card") for env in self._seen(step.pod).values()})
        told = {"why": f"{step.pod} {step.why}", "took": f"{took:.1f} s"}
        told |= {"sees": f"{explain.VISIBLE}={', '.join(sees)}"} if sees else {}
        told |= {"wrong": "; ".join(problems)} if problems else {}
        show(self._console, f"$ {step.command}", told, good=not problems)
        self._console.print(card_map([self._node()]))


def _status(raw: Json) -> Json:
    return raw.get("status") or {}


def _words(cards: Sequence[Card]) -> str:
    """`zxcvb: pod1 20%, pod3 40%; qwert: pod2 30%`."""
    pods = {gpuid: ", ".join(f"{pod} {format_core(core)}" for pod, core in uses.items()) for gpuid, uses in cards}
    return "; ".join(f"{gpuid or 'a card without GPUID'}: {text}" for gpuid, text in pods.items()) or "idle cards"
