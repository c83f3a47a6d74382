"""Takes each pod through the steps of a cluster: mutation, validation, filter, scores, binding and allocation.

Each step calls the same function as mgpu's webhook, scheduler or node agent, so that the results agree with those of a
cluster. `playground.fit` replaces the filters of kube-scheduler. `simulate_command` calls `simulate`.
"""

from collections.abc import Callable
from dataclasses import replace

from mgpu import dialects
from mgpu.dialects import mtgpu
from mgpu.dialects.registry import vocabularies
from mgpu.model.compute_resources import add_requests, requests_of
from mgpu.model.errors import BadObject, Problem
from mgpu.model.gpu_requests import GpuRequest, Placement, Rejection
from mgpu.model.ledger import Holding
from mgpu.model.pods import Pod, read_pod
from mgpu.model.resource_claims import DRA
from mgpu.presentation.card_views import NodeView, view_nodes
from mgpu.presentation.claim_views import holder_name
from mgpu.presentation.overview import NO_RECORD, NVIDIA_PLUGIN, describe_missing_cards, read_claim, read_request
from mgpu.settings import Settings
from playground import fit
from playground.simulate.claim_files import pod_problems
from playground.simulate.documents import Raw
from playground.simulate.mtgpupod_plans import MtgpuPods
from playground.simulate.node_trials import Fit, NodeTrials, counted
from playground.simulate.outcomes import Delivery, Outcome, Result
from playground.simulate.pod_admission import admit, amount_problems
from playground.simulate.simulated_claims import PodClaims, SimulatedClaims, claim_rows, delivered, views_of_containers
from playground.simulate.simulated_cluster import SimulatedCluster
from playground.simulate.world import World
from scheduler.engine import nvidia_plugin
from scheduler.engine.node_assessment import record
from webhook.mtgpupod_rules import validate_mtgpupod_create
from webhook.pod_rules import unknown_constraints


def simulate(world: World, settings: Settings, note: Callable[[str], None]) -> Result:
    """Place the submitted pods of a world one after the other, in the order of the files.

    Args:
        note: Receives a line for each problem of a node or a pod.
    """
    simulation = Simulation(world, settings, note)
    for name, node in simulation.cluster.partitioned.items():
        if node.problem:
            note(f"node {name}: its slices are ignored: {node.problem}")
    simulation.take_in(world)
    outcomes = [simulation.submit(raw) for raw in world.submitted]
    return Result(outcomes, simulation.node_views())


class Simulation:
    """One simulation. `take_in` is called once, before the first `submit`.

    `playground.simulate.right_sizing` places pods with other requests than their own.
    """

    def __init__(self, world: World, settings: Settings, note: Callable[[str], None]) -> None:
        self._settings = settings
        self._note = note
        self.cluster = SimulatedCluster(world, settings)
        # All Pods by `namespace/name`, including those that `_mtgpupods` creates.
        self._names: dict[str, Raw] = {}
        self._mtgpupods = MtgpuPods(self.cluster, settings, self._names, self.submit, self._unfit)
        self._claims = SimulatedClaims(self.cluster, settings, world.claims)
        self._trials = NodeTrials(self.cluster, self._claims, settings)

    def take_in(self, world: World) -> None:
        """Add the running pods: first those whose cards are known, then the others by late binding decisions."""
        running = self._without_unneeded_occupy_pods(world)
        nodes = self.cluster.partitioned.items()
        given = {name: {**world.given.get(name, {}), **node.reported_shares()} for name, node in nodes}
        unknown = {
            uid: Holding(uid, "", "", node, NVIDIA_PLUGIN, rows[uid]) for node, rows in given.items() for uid in rows
        }
        undecided: list[tuple[Pod, GpuRequest]] = []
        for raw in running:
            pod = read_pod(raw)
            request = read_request(pod, self._settings)
            unknown.pop(pod.uid, None)
            self._names[pod.key] = raw
            if isinstance(request, GpuRequest):
                self.cluster.forecast.pod_added(pod, request)
            if pod.ended:
                continue
            self.cluster.reserve(pod, raw, pod.node)
            claim = read_claim(pod, request, given.get(pod.node, {}).get(pod.uid, ()))
            if claim.holding:
                self._hold(pod, request, claim.holding)
            if claim.problem == NO_RECORD and isinstance(request, GpuRequest):
                undecided.append((pod, request))
            elif claim.problem:
                self._note(f"pod {pod.key}: {claim.problem}")
        for holding in unknown.values():
            self.cluster.hold(holding)
        self._claims.take_in()
        self._mtgpupods.take_in(world.mtgpupods, running, self._note)
        self.cluster.restore_slices()
        for holding in (held for held in self.cluster.ledger.holdings() if held.dialect != mtgpu.NAME):
            odd = describe_missing_cards(holding, (state.card for state in self.cluster.devices(holding.node)))
            if odd:
                self._note(f"{_subject(holding)}: {odd}")
        self._update_forecast()
        for pod, request in undecided:
            self._decide_late(pod, request)
        for raw in running:
            self._allocate_late(read_pod(raw), raw)
            self._mtgpupods.follow(read_pod(raw))
        self._mtgpupods.settle()

    def _hold(self, pod: Pod, request: GpuRequest | BadObject | None, holding: Holding) -> None:
        self.cluster.hold(holding)
        if isinstance(request, GpuRequest):
            self.cluster.forecast.pod_placed(pod, request)

    def _without_unneeded_occupy_pods(self, world: World) -> list[Raw]:
        """Return the running pods, except occupy pods that no MtgpuPod needs, which the controller would delete."""
        named = [read_pod(raw) for raw in (*world.mtgpupods, *world.submitted) if raw["kind"] == mtgpu.KIND]
        needed = {(pod.node, pod.annotations.get(mtgpu.GPUID)) for pod in named}
        running = []
        for raw in world.running:
            pod = read_pod(raw)
            found = mtgpu.occupy_target(pod)
            if found and found not in needed and mtgpu.enabled(self._settings):
                self._note(f"pod {pod.key}: ignored: no MtgpuPod needs its card, so the scheduler would delete it")
            else:
                running.append(raw)
        return running

    def node_views(self) -> tuple[NodeView, ...]:
        self._mtgpupods.name_containers()
        return view_nodes(self.cluster.ledger, self.cluster.partitions())

    def _unfit(self, raw: Raw, node: str, before: int) -> str:
        """Return why the kubelet would reject a Pod that was created with a node, or "".

        Taints and cordons are ignored, because no scheduler places such a Pod.

        Args:
            before: The number of Pods that are admitted before this one in the same step.
        """
        known = {**self.cluster.raw[node], "spec": {}}
        used = add_requests(self.cluster.used[node], {"pods": before})
        reasons = fit.fits(raw, known, used, counted(known))
        return reasons[0] if reasons else ""

    def _decide_late(self, pod: Pod, request: GpuRequest) -> None:
        """Choose the cards of a running pod that has no allocation record, on the node where it runs."""
        placement = self._trials.assess(pod, request, pod.node)
        if isinstance(placement, Rejection) and self.cluster.partition_for(pod, request, [pod.node]):
            placement = self._trials.assess(pod, request, pod.node)
        if isinstance(placement, Placement):
            self.cluster.place(pod, request, placement, pod.node)
            self.cluster.forecast.pod_placed(pod, request)
        else:
            self._note(f"pod {pod.key}: no cards on {pod.node}: {placement}")

    def _allocate_late(self, pod: Pod, raw: Raw) -> None:
        """Allocate the claims of a running pod that have no allocation, on the node where it runs."""
        if pod.ended or not raw["spec"].get("resourceClaims"):
            return
        problems = pod_problems(raw)
        claims = PodClaims(missing=str(problems[0])) if problems else self._claims.of_pod(pod, raw)
        allocations = claims.missing or self._claims.allocate(pod, claims, pod.node)
        if isinstance(allocations, list):
            self._claims.bind(pod, claims, allocations)
        else:
            self._note(f"pod {pod.key}: its claims hold no cards on {pod.node}: {allocations}")

    def _update_forecast(self) -> None:
        """Let the ranking score all nodes again if the expectation of future pods has changed."""
        if self.cluster.forecast.refresh():
            self._trials.refresh()

    def submit(self, raw: Raw) -> Outcome:
        """Take a pod or an MtgpuPod through all steps and return its outcome."""
        if raw["kind"] == mtgpu.KIND:
            return self._submit_mtgpupod(raw)
        outcome = Outcome(read_pod(raw))
        raw = self._admit(outcome, raw)
        if outcome.denied:
            return outcome
        self._names[outcome.pod.key] = raw
        request = dialects.read_request(outcome.pod, self._settings)
        claims = self._claims.of_pod(outcome.pod, raw)
        expected = request or claims.request()
        if expected is not None:
            self.cluster.forecast.pod_added(outcome.pod, expected)
            self._update_forecast()
        fits = self._trials.filter(outcome, raw, request, claims)
        if fits:
            node = min(fits, key=lambda name: (-outcome.scores.get(name, 0), name))
            self._bind(outcome, raw, request, fits[node].placement, node)
            self._bind_claims(outcome, raw, fits[node])
            if expected is not None:
                self.cluster.forecast.pod_placed(outcome.pod, expected)
        message = "; ".join(f"{name}: {reason}" for name, reason in outcome.rejections.items())
        self._mtgpupods.follow(replace(outcome.pod, node=outcome.node), message)
        return outcome

    def admitted(self, raw: Raw) -> Raw | None:
        """Return the pod as the webhook changes it, or None if it is denied."""
        outcome = Outcome(read_pod(raw))
        changed = self._admit(outcome, raw)
        return None if outcome.denied else changed

    def place(self, raw: Raw, request: GpuRequest) -> str | None:
        """Place an admitted pod with this request instead of its own. Return its node, or None if it fits nowhere."""
        outcome = Outcome(read_pod(raw))
        fits = self._trials.filter(outcome, raw, request, PodClaims())
        if not fits:
            return None
        node = min(fits, key=lambda name: (-outcome.scores.get(name, 0), name))
        placement = fits[node].placement
        self.cluster.reserve(outcome.pod, raw, node)
        if placement is not None:
            self.cluster.place(outcome.pod, request, placement, node)
        return node

    def count_further(self, raw: Raw, request: GpuRequest) -> int:
        """Return how many further pods like this one fit at the same time. Nothing stays placed.

        The nodes are filled one after the other, which gives the same number as any other order, since the pods are
        equal, and takes a fraction of the time.
        """
        count = 0
        for name, node in self.cluster.raw.items():
            used = self.cluster.used[name]
            placed: list[str] = []
            while not fit.fits(raw, node, used, counted(node)):
                uid = f"further/{name}/{len(placed)}"
                pod = replace(read_pod(raw), uid=uid)
                placement = self._trials.assess(pod, request, name)
                if not isinstance(placement, Placement):
                    break
                self.cluster.place(pod, request, placement, name)
                placed.append(uid)
                used = add_requests(used, requests_of(raw))
            for uid in placed:
                self.cluster.release(uid)
            count += len(placed)
        return count

    def _submit_mtgpupod(self, raw: Raw) -> Outcome:
        outcome = Outcome(read_pod(raw), dialect=mtgpu.NAME, kind=mtgpu.KIND)
        outcome.denied = validate_mtgpupod_create(raw, self._settings) or amount_problems(raw)
        if not outcome.denied:
            self._mtgpupods.submit(raw, outcome)
        return outcome

    def _admit(self, outcome: Outcome, raw: Raw) -> Raw:
        """Return the pod as the webhook changes it. Store the patch and the problems in the outcome."""
        found = admit(raw, self._settings)
        uses_claims = bool(found.raw["spec"].get("resourceClaims"))
        outcome.dialect = next(iter(vocabularies(found.pod)), DRA if uses_claims else None)
        outcome.patch = found.patch
        outcome.denied = found.denied
        if found.template is not None:
            self._claims.add_template(found.template)
        if outcome.pod.key in self._names and not outcome.denied:
            outcome.denied = [Problem("metadata.name", "is the name of a Pod that was created for an MtgpuPod")]
        for warning in unknown_constraints(found.raw, None):
            self._note(f"pod {outcome.pod.key}: {warning}")
        outcome.pod = found.pod
        return found.raw

    def _bind(
        self, outcome: Outcome, raw: Raw, request: GpuRequest | None, placement: Placement | None, node: str
    ) -> None:
        """Bind the pod to the node, and store its annotations and the environment of its containers in the outcome."""
        outcome.node = node
        self.cluster.reserve(outcome.pod, raw, node)
        if request is None or placement is None:
            return
        devices = self.cluster.devices(node)
        if not nvidia_plugin.chooses_cards(self.cluster.nodes[node], request):
            outcome.annotations = record(outcome.pod, request, placement, devices, self._settings, now_ns=0)
        self.cluster.place(outcome.pod, request, placement, node)
        cards, gpus = [state.card for state in devices], self.cluster.partitioned[node].gpus
        outcome.containers = Delivery(outcome.pod, request, placement, cards, gpus, self._settings).containers()

    def _bind_claims(self, outcome: Outcome, raw: Raw, found: Fit) -> None:
        """Write the allocations, and store the claims and what the containers see of them in the outcome."""
        if not found.claims.claims:
            return
        bound = self._claims.bind(outcome.pod, found.claims, found.allocations)
        outcome.claims = claim_rows(bound)
        cards = self.cluster.partitioned[outcome.node].gpus
        for name, views in views_of_containers(raw, bound, cards).items():
            if len(views) > 1 or name in outcome.containers:
                text = "uses several claims, or a claim and cards of its own, so its agent does not start it"
                self._note(f"pod {outcome.pod.key}: container {name} {text}")
        outcome.containers |= delivered(raw, bound, cards)


def _subject(holding: Holding) -> str:
    """Return the holder of cards for a note."""
    return holder_name(holding) if holding.dialect == DRA else f"pod {holding.key}"
