"""`mgpu demo`: sample pods through the whole chain, each outcome explained and checked, then the cards as a picture."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console

from deviceplugin.mig.state import Mode, read_state
from mgpu.cli import asking
from mgpu.cli.picture import card_map
from mgpu.cli.setup import read_settings
from mgpu.kube import ApiError
from mgpu.model.cards import Card, CardState
from mgpu.model.ledger import Share
from mgpu.model.partitioning import NodeSlices
from mgpu.model.slices import MIG, MPS, Slice
from mgpu.settings import Settings
from playground import explain, slices_told
from playground.cluster import Cluster
from playground.command import options, show, stopping, up
from playground.nodes import MGPU, TWO_CARDS
from playground.samples import Json, Outcome, Samples, example
from playground.scheduling.extender import Extender, ExtenderError
from playground.story import Story

SIDE_BY_SIDE = ("share", "gpushare", "koordinator", "nvidia")
SHOWN = ("several-containers", "multi-gpu", "whole-cards")
SLICES = {MIG: "mig", MPS: "mps"}
"""How a node's cards are cut → the example for it."""
CROWD = 12
_SECONDS = 30.0

EXAMPLES = """
\b
Examples:
  mgpu demo
  mgpu demo --nodes 3 --cards 8
"""


@click.command(epilog=EXAMPLES)
@options(nodes=2, cards=4)  # what the examples need
def command(nodes: int, cards: int, config: Path | None) -> None:
    """Run sample pods through the whole chain and show the cards.

    API server, scheduling loop, kubelets and GPUs are simulated on this machine; the webhook, the scheduler and the
    node agents are the real processes. Exit code 1 when a container did not get exactly its cards.
    """
    console = Console(highlight=False)
    settings = read_settings(config, {}, {})
    with stopping(), up(console, nodes, cards, config) as cluster:
        problems = Demo(cluster, console, settings).run()
    if problems:
        raise click.ClickException("; ".join(problems))


class _Before(NamedTuple):
    """How the nodes were before a pod came: their cards, and of those that are cut their slices."""

    states: Mapping[str, tuple[CardState, ...]]
    slices: Mapping[str, NodeSlices]


class Demo:
    """Runs once; collects in `problems` what did not go as it must."""

    def __init__(self, cluster: Cluster, console: Console, settings: Settings) -> None:
        self._cluster, self._console, self._settings = cluster, console, settings
        self._samples = Samples(cluster.api, settings)
        self.problems: list[str] = []

    def run(self) -> list[str]:
        # First: a card that others have shares of is not cut.
        for node in self._cluster.nodes:
            if node.partitioning:
                self.show_placed(example(SLICES[node.partitioning]))
        self._show_story()
        for name in SIDE_BY_SIDE:
            self.show_placed(example(name))
        self._show_side_by_side()
        for name in SHOWN:
            self.show_placed(example(name))
        self._show_denied(example("denied"))
        self._show_waiting(example("fits-nowhere"))
        self._show_crowd(example("share"))
        self._console.print()
        self._console.print(card_map(self._samples.overview().nodes))
        return self.problems

    def _show_story(self) -> None:
        """Before others have the two cards."""
        if any(node.name == TWO_CARDS for node in self._cluster.nodes):
            self.problems += Story(self._cluster, self._samples, self._console).run()

    def show_placed(self, pod: Json) -> None:
        """Create it, and tell where it is and what it sees; what is wrong goes into `problems`."""
        before, started = self._before(), time.monotonic()
        try:
            created = self._samples.create(pod)
        except ApiError as error:
            self._tell(pod, {"webhook": f"denied: {error.message}"}, good=False)
            self.problems.append(f"{pod['metadata']['name']} was denied")
            return
        name, ask = pod["metadata"]["name"], self._samples.ask(created)
        # One that asks for slices is refused until they are made.
        outcome = self._samples.running(name) if ask and ask.others else self._samples.settled(name)
        took = time.monotonic() - started
        told = {"asks": f"{self._asks(created)} → admitted"}
        if not outcome.running:
            self._tell(pod, told | {"waits": outcome.why or "nothing happened"}, good=False)
            self.problems.append(f"{pod['metadata']['name']} does not run: {outcome.why or 'nothing happened'}")
            return
        told |= self._placement(created, outcome, before, took)
        wrong = self._check(outcome)
        self._tell(pod, told | self._sees(outcome, wrong), good=not wrong)

    def _before(self) -> _Before:
        cut = [node.name for node in self._cluster.nodes if node.partitioning]
        return _Before(self._samples.states(), {name: self._samples.slices(name) for name in cut})

    def _show_side_by_side(self) -> None:
        """Each card that pods of several vocabularies share now; under other policies there may be none."""
        cards = [(node.name, card) for node in self._samples.overview().nodes for card in node.cards]
        together = {
            f"{node}, card {card.state.card.index}": ", ".join(
                sorted(f"{use.dialect} ({use.pod})" for use in card.uses)
            )
            for node, card in cards
            if len({use.dialect for use in card.uses}) > 1
        }
        if together:
            self._tell({"metadata": {"name": "side by side"}}, together, good=True)

    def _show_denied(self, pod: Json) -> None:
        try:
            self._samples.create(pod)
        except ApiError as error:
            rules = error.message.partition("denied the request: ")[2] or error.message
            self._tell(pod, {"webhook": f"denied: {rules}"}, good=error.status == 422)
        else:
            self._tell(pod, {"webhook": "admitted, which is wrong"}, good=False)
            self.problems.append("the denied example was admitted")

    def _show_waiting(self, pod: Json) -> None:
        created = self._samples.create(pod)
        outcome = self._samples.settled(pod["metadata"]["name"])
        told = {"asks": f"{self._asks(created)} → admitted", "waits": explain.refusals(self._refusals(created))}
        if outcome.node or not outcome.why:
            self.problems.append(f"{pod['metadata']['name']} is on {outcome.node or 'no node, without a reason'}")
            told["waits"] = outcome.node or "nothing was said"
        self._tell(pod, told, good=bool(outcome.why and not outcome.node))

    def _show_crowd(self, pod: Json) -> None:
        """Equal pods at once: the kubelet does not say whose an Allocate is, and still everyone gets its own cards."""
        room = self._room(pod)
        names = [f"crowd-{i + 1}" for i in range(room)]
        started = time.monotonic()
        for name in names:
            self._samples.create({**pod, "metadata": {"name": name}})
        outcomes = {name: self._samples.running(name, _SECONDS - (time.monotonic() - started)) for name in names}
        took = time.monotonic() - started
        wrong = [name for name, outcome in outcomes.items() if not outcome.running or self._check(outcome)]
        self.problems += [f"{name} does not run" for name, outcome in outcomes.items() if not outcome.running]
        nodes = sorted({outcome.node for outcome in outcomes.values() if outcome.node})
        text = f"{room - len(wrong)} of {room} run with exactly the cards of their own record"
        told = {"asks": f"share.yaml, {room} times at once", "placed": f"on {', '.join(nodes)} in {took:.1f} s"}
        self._tell({"metadata": {"name": "crowd"}}, told | {"see": text}, good=not wrong)

    def _room(self, pod: Json) -> int:
        """How many more of this pod fit on the nodes that have its policy, a dozen at most."""
        ask = self._samples.ask(pod)
        shares = ask.containers if ask else ()
        nodes = {node.name for node in self._cluster.nodes if node.labels == MGPU}
        states = [s for name, found in self._samples.states().items() if name in nodes for s in found]
        return min(CROWD, sum(min(s.core_free // c.core, s.memory_free // c.memory) for s in states for c in shares))

    def _asks(self, pod: Json) -> str:
        ask = self._samples.ask(pod)
        return asking.asked(ask) if ask else "no GPU"

    def _placement(self, created: Json, outcome: Outcome, before: _Before, took: float) -> dict[str, str]:
        ask, shares = self._samples.ask(outcome.pod), self._samples.record(outcome.pod)
        if ask is None or shares is None:
            return {"placed": f"{outcome.node}, without a record"}
        slices = slices_told.given(shares)
        if slices:
            plan = slices_told.planned(before.slices[outcome.node], self._samples.slices(outcome.node))
            return {"placed": f"{outcome.node}, {took:.1f} s: {slices}", "plan": plan}
        where = explain.given(shares, before.states[outcome.node])
        told = {"placed": f"{outcome.node}, {took:.1f} s: {where}", "why": asking.choice(ask, self._settings)}
        elsewhere = {node: why for node, why in self._refusals(created).items() if node != outcome.node}
        return told | ({"not on": explain.refusals(elsewhere)} if elsewhere else {})

    def _refusals(self, pod: Json) -> Mapping[str, str]:
        """Node → why not, as the scheduler process says; the pod's own cards count as taken."""
        nodes = self._cluster.api.list("/api/v1/nodes")[0]
        try:
            found = Extender(self._cluster.extender_url).filter(pod, nodes)
        except ExtenderError as error:
            return {"scheduler": str(error)}
        return {**found.failed, **found.hopeless}

    def _check(self, outcome: Outcome) -> list[str]:
        """What the containers of a running pod see that is not in its record, or the reverse."""
        shares: tuple[Share, ...] = self._samples.record(outcome.pod) or ()
        cards = self._samples.cards(outcome.node)
        sliced = slices_told.visible(shares, self._mig_devices(outcome.node, cards), cards, self._mode(outcome.node))
        wanted = explain.visible(shares, cards) | sliced
        wrong = explain.differences(wanted, self._seen(outcome))
        name = outcome.pod["metadata"]["name"]
        self.problems += [f"{name}: {problem}" for problem in wrong]
        if not wanted:
            self.problems.append(f"{name} runs without a record")
        return wrong

    def _mode(self, node: str) -> str:
        return next(spec.partitioning for spec in self._cluster.nodes if spec.name == node)

    def _mig_devices(self, node: str, cards: Sequence[Card]) -> dict[Slice, str]:
        """As the node's NVML has them."""
        modes = read_state(self._cluster.nvml_state(node)).cards
        return {
            Slice(card.index, gpu.start, gpu.profile): compute.uuid
            for card in cards
            for gpu in modes.get(card.uuid, Mode()).instances
            for compute in gpu.compute
        }

    def _seen(self, outcome: Outcome) -> dict[str, Mapping[str, str]]:
        runtime = self._cluster.kubelets[outcome.node].runtime
        return {c.name: c.env for c in runtime.containers(outcome.pod["metadata"]["uid"])}

    def _sees(self, outcome: Outcome, wrong: list[str]) -> dict[str, str]:
        if wrong:
            return {"sees": "; ".join(wrong)}
        seen = self._seen(outcome)
        keys = (explain.VISIBLE, *slices_told.LIMITS)
        values = {name: ", ".join(f"{key}={env[key]}" for key in keys if key in env) for name, env in seen.items()}
        return {"sees": "; ".join(f"{name}: {text}" for name, text in values.items())}

    def _tell(self, pod: Mapping[str, Any], told: Mapping[str, str], *, good: bool) -> None:
        show(self._console, pod["metadata"]["name"], told, good=good)
