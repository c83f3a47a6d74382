"""Implements `mgpu demo`, which runs sample pods, explains and checks the outcome of each one, and draws the cards."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console

from mgpu.cli.process_settings import read_settings
from mgpu.kube import ApiError
from mgpu.model.cards import CardState
from mgpu.model.node_slices import NodeSlices
from mgpu.model.slice_names import MIG, MPS, Slice
from mgpu.presentation import request_text
from mgpu.presentation.card_map import card_map
from mgpu.settings import Settings
from playground import containers
from playground.cluster import Cluster
from playground.nodes import MGPU, TWO_CARDS
from playground.nvml_state import Mode, read_state
from playground.playground_command import options, show, stopping, up
from playground.samples import Json, Outcome, Samples, example, templates_for
from playground.scheduling.extender_client import Extender, ExtenderError
from playground.story import Story

CLAIM = "claim"
"""The example with a ResourceClaim, which needs the component `dra`."""
SIDE_BY_SIDE = ("share", "gpushare", "koordinator", CLAIM, "nvidia")
"""The examples of several vocabularies, and of a ResourceClaim, whose pods may share a card."""
OTHERS = ("several-containers", "multi-gpu", "whole-cards")
"""The other examples that must run."""
SLICES = {MIG: "mig", MPS: "mps"}
"""The example for each value of `NodeSpec.partitioning`."""
_CROWD = 12
"""The largest number of pods that `_show_crowd` creates."""
_CROWD_SECONDS = 30.0
"""The time within which all pods of the crowd must run."""

EXAMPLES = """
\b
Examples:
  mgpu demo
  mgpu demo --nodes 3 --cards 8
"""


@click.command(epilog=EXAMPLES)
@options(nodes=2, cards=4)  # with fewer nodes or cards, some examples would not run
def command(nodes: int, cards: int, config: Path | None) -> None:
    """Run sample pods on a one-machine cluster, and show the cards.

    API server, scheduling loop, kubelets and GPUs are simulated on this machine; the webhook, the scheduler and the
    node agents are the real processes. The exit code is 1 if the cluster does not start or a check fails, for example
    if a container does not see exactly its cards.
    """
    console = Console(highlight=False)
    settings = read_settings(config, {}, {})
    with stopping(), up(console, nodes, cards, config) as cluster:
        problems = Demo(cluster, console, settings).run()
    if problems:
        raise click.ClickException("; ".join(problems))


class _Before(NamedTuple):
    """The state of the nodes before a pod was created.

    Attributes:
        states: The cards of each node, by the name of the node.
        slices: The slices of each partitioned node, by the name of the node.
    """

    states: Mapping[str, tuple[CardState, ...]]
    slices: Mapping[str, NodeSlices]


class Demo:
    """One run of the demo.

    Attributes:
        problems: A message for every check that failed.
    """

    def __init__(self, cluster: Cluster, console: Console, settings: Settings) -> None:
        self._cluster = cluster
        self._console = console
        self._settings = settings
        self._samples = Samples(cluster.api, settings)
        self.problems: list[str] = []

    def run(self) -> list[str]:
        """Show all examples and the cards. Return `problems`."""
        # The slices come first, because a card with shares on it is not partitioned. Then comes the story of MtgpuPods,
        # which needs two idle cards.
        for node in self._cluster.nodes:
            if node.partitioning:
                self.show_placed(example(SLICES[node.partitioning]))
        if any(node.name == TWO_CARDS for node in self._cluster.nodes):
            self.problems += Story(self._cluster, self._samples, self._console).run()
        for name in SIDE_BY_SIDE:
            if name != CLAIM or "dra" in self._cluster.components:
                self.show_placed(example(name), templates_for(name))
        self._show_side_by_side()
        for name in OTHERS:
            self.show_placed(example(name))
        self._show_denied(example("denied"))
        self._show_waiting(example("fits-nowhere"))
        self._show_crowd(example("share"))
        self._console.print()
        self._console.print(card_map(self._samples.overview().nodes), crop=False)
        return self.problems

    def show_placed(self, pod: Json, templates: Sequence[Json] = ()) -> None:
        """Create a pod that must run, and show on which cards it runs and what its containers see.

        Args:
            templates: The ResourceClaimTemplates of the pod, which are created before it.
        """
        name = pod["metadata"]["name"]
        before = self._before()
        started = time.monotonic()
        try:
            for template in templates:
                self._samples.create_template(template)
            created = self._samples.create(pod)
        except ApiError as error:
            self._show(name, {"webhook": f"denied: {error.message}"}, good=False)
            self.problems.append(f"{name} was denied")
            return
        request = self._samples.request(created)
        # The scheduler rejects a pod that requests slices until the slices exist.
        outcome = self._samples.running(name) if request and request.others else self._samples.settled(name)
        seconds = time.monotonic() - started
        rows = {"asks": f"{self._asks(created)} → admitted"}
        if not outcome.running:
            reason = outcome.reason or "nothing happened"
            self._show(name, rows | {"waits": reason}, good=False)
            self.problems.append(f"{name} does not run: {reason}")
            return
        rows |= self._placement(created, outcome, before, seconds)
        wrong = self._check(outcome)
        rows["sees"] = "; ".join(wrong) or self._visible(outcome)
        self._show(name, rows, good=not wrong)

    def _before(self) -> _Before:
        partitioned = [node.name for node in self._cluster.nodes if node.partitioning]
        return _Before(self._samples.states(), {name: self._samples.slices(name) for name in partitioned})

    def _show_side_by_side(self) -> None:
        """Show each card that pods of several vocabularies and claims share. Under some policies there is none."""
        cards = [(node.name, card) for node in self._samples.overview().nodes for card in node.cards]
        together = {
            f"{node}, card {card.state.card.index}": ", ".join(sorted(f"{u.dialect} ({u.pod})" for u in card.uses))
            for node, card in cards
            if len({use.dialect for use in card.uses}) > 1
        }
        if together:
            self._show("side by side", together, good=True)

    def _show_denied(self, pod: Json) -> None:
        """Create a pod that the webhook must deny, and show why the webhook denies it."""
        name = pod["metadata"]["name"]
        try:
            self._samples.create(pod)
        except ApiError as error:
            rules = error.message.partition("denied the request: ")[2] or error.message
            self._show(name, {"webhook": f"denied: {rules}"}, good=error.status == 422)
        else:
            self._show(name, {"webhook": "admitted, which is wrong"}, good=False)
            self.problems.append("the denied example was admitted")

    def _show_waiting(self, pod: Json) -> None:
        """Create a pod that no node can take, and show why it must wait."""
        name = pod["metadata"]["name"]
        created = self._samples.create(pod)
        outcome = self._samples.settled(name)
        good = bool(outcome.reason and not outcome.node)
        waits = self._refusals(created)
        if not good:
            waits = outcome.node or "no node, without a reason"
            self.problems.append(f"{name} is on {waits}")
        self._show(name, {"asks": f"{self._asks(created)} → admitted", "waits": waits}, good=good)

    def _show_crowd(self, pod: Json) -> None:
        """Create equal pods at once. Each must see the cards of its own record, although Allocate names no pod."""
        count = self._count_fitting(pod)
        names = [f"crowd-{i + 1}" for i in range(count)]
        started = time.monotonic()
        for name in names:
            self._samples.create({**pod, "metadata": {"name": name}})
        deadline = started + _CROWD_SECONDS
        outcomes = {name: self._samples.running(name, deadline - time.monotonic()) for name in names}
        seconds = time.monotonic() - started
        wrong = [name for name, outcome in outcomes.items() if not outcome.running or self._check(outcome)]
        self.problems += [f"{name} does not run" for name, outcome in outcomes.items() if not outcome.running]
        nodes = sorted({outcome.node for outcome in outcomes.values() if outcome.node})
        rows = {
            "asks": f"share.yaml, {count} times at once",
            "placed": f"on {', '.join(nodes)} in {seconds:.1f} s",
            "see": f"{count - len(wrong)} of {count} run with exactly the cards of their own record",
        }
        self._show("crowd", rows, good=not wrong)

    def _count_fitting(self, pod: Json) -> int:
        """Return how many pods like this one still fit on the nodes with the labels MGPU, but at most `_CROWD`.

        The pod must have one container.
        """
        request = self._samples.request(pod)
        shares = request.containers if request else ()
        nodes = {node.name for node in self._cluster.nodes if node.labels == MGPU}
        states = [s for name, found in self._samples.states().items() if name in nodes for s in found]
        return min(_CROWD, sum(min(s.core_free // c.core, s.memory_free // c.memory) for s in states for c in shares))

    def _asks(self, pod: Json) -> str:
        request = self._samples.request(pod)
        return request_text.describe_request(request) if request else "no GPU"

    def _placement(self, created: Json, outcome: Outcome, before: _Before, seconds: float) -> dict[str, str]:
        """Return the rows that say on which cards the pod is, how long that took, and why it is there."""
        request, shares = self._samples.request(outcome.pod), self._samples.record(outcome.pod)
        if request is None or shares is None:
            return {"placed": f"{outcome.node}, without a record"}
        if slices := containers.describe_slices(shares):
            plan = containers.describe_plan(before.slices[outcome.node], self._samples.slices(outcome.node))
            return {"placed": f"{outcome.node}, {seconds:.1f} s: {slices}", "plan": plan}
        cards = containers.describe_cards(shares, before.states[outcome.node])
        rows = {
            "placed": f"{outcome.node}, {seconds:.1f} s: {cards}",
            "why": request_text.describe_policy(request, self._settings),
        }
        elsewhere = self._refusals(created, without=outcome.node)
        return rows | ({"not on": elsewhere} if elsewhere else {})

    def _refusals(self, pod: Json, without: str = "") -> str:
        """Return a text with the extender's current reason for each node that it rejects, except for `without`.

        If the call fails, the text is the error.
        """
        try:
            found = Extender(self._cluster.extender_url).filter(pod, [node.name for node in self._cluster.nodes])
        except ExtenderError as error:
            return f"scheduler: {error}"
        return "; ".join(f"{node}: {reason}" for node, reason in sorted(found.failed.items()) if node != without)

    def _check(self, outcome: Outcome) -> list[str]:
        """Return the differences between what the containers of a running pod see and the cards of its record.

        The differences are also added to `problems`, and so is a missing record.
        """
        name, shares = outcome.pod["metadata"]["name"], self._samples.record(outcome.pod) or ()
        cards = self._samples.cards(outcome.node)
        expected = containers.expected_cards(shares, cards)
        expected |= containers.expected_slices(shares, self._mig_devices(outcome.node), cards)
        wrong = containers.differences(expected, self._environments(outcome))
        self.problems += [f"{name}: {problem}" for problem in wrong]
        if not expected:
            self.problems.append(f"{name} runs without a record")
        return wrong

    def _mig_devices(self, node: str) -> dict[Slice, str]:
        """Return the UUIDs of the MIG devices in the node's simulated NVML, by their slices."""
        modes = read_state(self._cluster.nvml_state(node)).cards
        return {
            Slice(card.index, gpu.start, gpu.profile): compute.uuid
            for card in self._samples.cards(node)
            for gpu in modes.get(card.uuid, Mode()).instances
            for compute in gpu.compute
        }

    def _environments(self, outcome: Outcome) -> dict[str, Mapping[str, str]]:
        """Return the environment variables of each container of a pod, by the name of the container."""
        runtime = self._cluster.kubelets[outcome.node].runtime
        return {c.name: c.env for c in runtime.containers(outcome.pod["metadata"]["uid"])}

    def _visible(self, outcome: Outcome) -> str:
        """Return the environment variables that tell the containers of a pod their cards and their share of each."""
        keys = (containers.VISIBLE, *containers.LIMITS)
        return "; ".join(
            f"{name}: {', '.join(f'{key}={env[key]}' for key in keys if key in env)}"
            for name, env in self._environments(outcome).items()
        )

    def _show(self, title: str, rows: Mapping[str, str], *, good: bool) -> None:
        show(self._console, title, rows, good=good)
