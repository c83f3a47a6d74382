"""The MtgpuPods of `mgpu simulate`.

`MtgpuPods` takes the place of the scheduler's MtgpuPod controller (docs/design/mtgpu.md, "Controller"). It makes the
scheduler's plan for a node, carries it out at once, and repeats this until the plan changes nothing. In this module, a
Pod is an object of Kubernetes' kind Pod, and the Pod of an MtgpuPod is the one that runs its containers. `pipeline`
calls `MtgpuPods`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mgpu.dialects import mtgpu
from mgpu.dialects.mtgpu_pods import manifest as own_pod
from mgpu.model.cards import GPU, Card
from mgpu.model.ledger import Holding
from mgpu.model.pods import Pod, read_pod
from mgpu.presentation.card_views import percent
from mgpu.presentation.mtgpupod_tables import by_container, missing_card, read_mtgpupods
from mgpu.settings import Settings
from playground.simulate.documents import Raw
from playground.simulate.outcomes import Outcome
from playground.simulate.simulated_cluster import SimulatedCluster
from scheduler.cluster.gpuids import GpuidLimit, UsedGpuids
from scheduler.engine import nvidia_plugin
from scheduler.mtgpupods.mtgpupod_status import DesiredMtgpuPod
from scheduler.mtgpupods.node_plan import plan_node
from scheduler.mtgpupods.observed_node import ObservedNode, OwnedPod, is_owned, read_owned_pod
from scheduler.mtgpupods.occupy_pods import CreateOccupyPod, DeleteOccupyPod, OccupyPod
from scheduler.mtgpupods.occupy_pods import manifest as occupy_pod

_NOT_SERVED = "MtgpuPods are not enabled in the settings"


@dataclass(slots=True)
class _Row:
    """An MtgpuPod of the simulation.

    Attributes:
        pod: The parsed MtgpuPod.
        raw: The object as it was read.
        outcome: The outcome to fill in, or None for an MtgpuPod that had a card before the simulation.
        made: The Pod of the MtgpuPod, or None if it has not been created.
    """

    pod: mtgpu.MtgpuPod
    raw: Raw
    outcome: Outcome | None = None
    made: OwnedPod | None = None


class MtgpuPods:
    """All MtgpuPods of the simulation.

    Args:
        cluster: The simulated cluster, in which the MtgpuPods hold their cards.
        settings: The settings of the simulation.
        names: All Pods by `namespace/name`. The pipeline changes the same dictionary.
        submit: A function that places an occupy pod like any other Pod.
        unfit: A function of a Pod, a node and the number of Pods that start on the node before the Pod. It returns why
            the node's kubelet would reject the Pod, or "".
    """

    def __init__(
        self,
        cluster: SimulatedCluster,
        settings: Settings,
        names: dict[str, Raw],
        submit: Callable[[Raw], object],
        unfit: Callable[[Raw, str, int], str],
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._names = names
        self._submit = submit
        self._unfit = unfit
        self._rows: dict[str, _Row] = {}
        self._admitted: dict[str, Holding] = {}
        self._occupies: dict[tuple[str, str], OccupyPod] = {}
        self._submitted = 0

    def take_in(self, bound: Iterable[Raw], pods: Sequence[Raw], note: Callable[[str], None]) -> None:
        """Add the MtgpuPods that had a card or had ended before the simulation. Those that hold no card are ignored.

        Args:
            bound: These MtgpuPods.
            pods: The Pods that have a node.
            note: A function that prints a note for the user.
        """
        raws = {raw["metadata"]["uid"]: raw for raw in bound}
        found = read_mtgpupods(raws.values(), pods)
        for what, why in found.unclear.items():
            note(f"{what}: {why}")
        for holding in found.holdings:
            self._cluster.hold(holding)
        for view in found.views:
            odd = missing_card(view, self._cards(view.pod.node))
            if odd:
                note(f"MtgpuPod {view.pod.key}: {odd}")
            self._rows[view.pod.uid] = self._running(_Row(view.pod, raws[view.pod.uid]))

    def _running(self, row: _Row) -> _Row:
        """Find the Pod of an MtgpuPod, or create it if its name is free and its card exists. Return the row."""
        there, card = self._names.get(row.pod.key), self._card(row.pod.node, row.pod.card_uuid)
        if there is not None and is_owned(there, row.pod.uid, row.pod.pod_uid):
            row.made = OwnedPod(there["metadata"]["uid"], "Running", card=row.pod.card_uuid)
        elif there is None and card is not None:
            self._make(row, card)
        return row

    def settle(self) -> None:
        """Carry out the plans of all nodes that have MtgpuPods. All running pods must have been added before."""
        for node in sorted({row.pod.node for row in self._rows.values()}):
            self._settle(node)

    def follow(self, pod: Pod, message: str | None = None) -> None:
        """Record the state of a Pod if it is an occupy pod. `message` says why it is pending if it has no node."""
        node, gpuid = mtgpu.occupy_target(pod) or ("", "")
        if gpuid and pod.node in ("", node):
            phase = "Running" if pod.node else "Pending"
            phase = pod.phase if pod.ended else phase
            holding = self._cluster.ledger.holding(pod.uid)
            cards = (card.uuid for card in self._cards(node) if holding and holding.is_known_on(card))
            self._occupies[node, gpuid] = OccupyPod(pod.uid, True, phase, pod.deleting, next(cards, None), message)

    def submit(self, raw: Raw, outcome: Outcome) -> None:
        """Add an admitted MtgpuPod and carry out the plan of its node.

        MtgpuPods are planned in the order of their submission, whatever their creationTimestamps are.
        """
        outcome.phase = "Pending"
        if not mtgpu.enabled(self._settings):
            outcome.rejections = {outcome.pod.node: _NOT_SERVED}
            return
        self._submitted += 1
        pod = replace(mtgpu.read_mtgpupod({**raw, "status": {}}), created=f"{self._submitted:09}")
        there = self._names.get(pod.key)
        made = read_owned_pod(there) if there is not None and is_owned(there, pod.uid, pod.pod_uid) else None
        self._rows[pod.uid] = _Row(pod, raw, outcome, made)
        self._settle(pod.node)

    def name_containers(self) -> None:
        """Put the names of the containers into the holding of each MtgpuPod, because the output lists them."""
        for row in self._rows.values():
            holding = self._cluster.ledger.holding(row.pod.uid)
            if holding:
                self._cluster.hold(by_container(holding, read_pod(row.raw)))

    def _settle(self, node: str) -> None:
        while self._step(node):
            pass

    def _step(self, node: str) -> bool:
        """Make the plan for a node and carry it out once. Return whether the node has to be planned again."""
        planned = plan_node(self._observed(node))
        starting = {step.gpuid for step in planned.occupy_pod_steps if isinstance(step, CreateOccupyPod)}
        for held in planned.reservations:
            if self._fail_if_unfit(self._rows[held.uid], int(held.gpuid in starting)):
                return True
        self._admit(node, planned.reservations)
        again = [self._occupy(node, step) for step in planned.occupy_pod_steps]
        again += [self._bind(self._rows[uid], desired) for uid, desired in planned.desired.items()]
        for uid, desired in planned.desired.items():
            self._report(self._rows[uid], desired)
        return any(again)

    def _observed(self, node: str) -> ObservedNode:
        known = self._cluster.nodes[node]
        rows = {uid: row for uid, row in self._rows.items() if row.pod.node == node}
        own = {uid: row.made for uid, row in rows.items() if row.made}
        occupies = {gpuid: occupy for (of, gpuid), occupy in self._occupies.items() if of == node}
        for gpuid in {row.pod.gpuid for row in rows.values()} - set(occupies):
            there = self._names.get(f"{mtgpu.OCCUPY_NAMESPACE}/{mtgpu.occupy_name(node, gpuid)}")
            if there is not None:
                occupies[gpuid] = OccupyPod(there["metadata"]["uid"], ours=False)
        return ObservedNode(
            node,
            tuple(row.pod for row in rows.values()),
            self._cards(node),
            self._cluster.ledger.holdings(node),
            unschedulable=bool((self._cluster.raw[node].get("spec") or {}).get("unschedulable")),
            nvidia_plugin=nvidia_plugin.is_on_node(known),
            owned_pods=own,
            name_conflicts=frozenset(uid for uid, row in rows.items() if uid not in own and row.pod.key in self._names),
            occupy_pods=occupies,
            reservations={uid: held for uid, held in self._admitted.items() if held.node == node},
            gpuid_limit=self._gpuid_limit(node, {row.pod.namespace for row in rows.values()}),
        )

    def _gpuid_limit(self, node: str, namespaces: set[str]) -> GpuidLimit | None:
        most = self._settings.dialects.mtgpu.max_gpuids
        if most is None:
            return None
        return GpuidLimit(most, UsedGpuids(self._cluster.ledger.holdings()).elsewhere(namespaces, node))

    def _fail_if_unfit(self, row: _Row, before: int) -> bool:
        """Set a submitted MtgpuPod to Failed if the kubelet would reject its Pod. Return whether it was set.

        Only the kubelet checks the cpu and the memory of such a Pod, because no scheduler places it. `before` is the
        number of Pods that start on the node before it.
        """
        reason = self._unfit(row.raw, row.pod.node, before)
        if not reason or row.outcome is None:
            return False
        row.outcome.phase = "Failed"
        row.outcome.reason = _kubelet_reason(reason)
        row.outcome.rejections = {row.pod.node: f"its kubelet does not start the Pod: {reason}"}
        del self._rows[row.pod.uid]
        self._admitted.pop(row.pod.uid, None)
        self._cluster.release(row.pod.uid)
        return True

    def _admit(self, node: str, holdings: Sequence[Holding]) -> None:
        """Replace the node's reservations, which MtgpuPods without a card hold, by the `holdings` of a new plan."""
        for uid in [uid for uid, held in self._admitted.items() if held.node == node]:
            del self._admitted[uid]
            self._cluster.release(uid)
        for held in holdings:
            self._admitted[held.uid] = held
            self._cluster.hold(held)

    def _occupy(self, node: str, step: CreateOccupyPod | DeleteOccupyPod) -> bool:
        """Create an occupy pod, or delete one that has ended. Return whether anything changed.

        An occupy pod that no MtgpuPod uses is not deleted while it runs, because a later MtgpuPod may need it.
        """
        if isinstance(step, DeleteOccupyPod):
            gone = self._occupies[node, step.gpuid].ended
            if gone:
                del self._occupies[node, step.gpuid]
                del self._names[f"{mtgpu.OCCUPY_NAMESPACE}/{mtgpu.occupy_name(node, step.gpuid)}"]
            return gone
        raw = occupy_pod(node, step.gpuid, self._settings)
        raw["metadata"]["uid"] = f"{mtgpu.OCCUPY_NAMESPACE}/{raw['metadata']['name']}"
        # Until the occupy pod has a card, the MtgpuPods of its GPUID hold a share of every card. These shares must not
        # block the occupy pod.
        waiting = [
            h for h in self._admitted.values() if (h.node, h.gpuid, h.shares[0].card) == (node, step.gpuid, None)
        ]
        for held in waiting:
            self._cluster.release(held.uid)
        self._submit(raw)
        for held in waiting:
            self._cluster.hold(held)
        return True

    def _bind(self, row: _Row, desired: DesiredMtgpuPod) -> bool:
        """Give the MtgpuPod its card and create its Pod, if the plan says so. Return whether anything changed."""
        new = desired.bind is not None and not row.pod.card_uuid
        if desired.bind is not None and new:
            row.pod = replace(row.pod, card_uuid=desired.bind)
            self._admitted.pop(row.pod.uid, None)
            self._cluster.hold(mtgpu.holding(row.pod, desired.bind))
        create = desired.create_pod and row.made is None
        if create and desired.card:
            self._make(row, desired.card)
        return new or create

    def _make(self, row: _Row, card: Card) -> None:
        """Create the Pod of the MtgpuPod on the card. It runs at once."""
        raw = own_pod(row.raw, row.pod, card.uuid, card.index)
        uid = f"{row.pod.uid}/pod"
        raw["metadata"]["uid"] = uid
        self._names[row.pod.key] = raw
        self._cluster.reserve(read_pod(raw), raw, row.pod.node)
        row.made = OwnedPod(uid, "Running", card=card.uuid)

    def _report(self, row: _Row, desired: DesiredMtgpuPod) -> None:
        """Fill in the outcome of a submitted MtgpuPod: the card of its Pod, or the reason why it has none."""
        outcome = row.outcome
        if outcome is None:
            return
        card = self._card(row.pod.node, row.pod.card_uuid) if row.made else None
        if card is None:
            condition = desired.created if row.pod.card_uuid else desired.bound
            outcome.reason = condition.reason if condition else ""
            outcome.rejections = {row.pod.node: condition.message} if condition else {}
            return
        outcome.phase = "Running"
        outcome.reason = "Bound"
        outcome.node = row.pod.node
        outcome.rejections = {}
        outcome.containers = {
            container.name: {
                "cards": [card.index],
                "core": [percent(row.pod.request)],
                "memory": [row.pod.memory],
                "env": mtgpu.environment(row.pod, card.uuid, card.index),
            }
            for container in outcome.pod.containers
        }

    def _cards(self, node: str) -> tuple[Card, ...]:
        """Return the GPUs of a node that are not partitioned."""
        return tuple(card for card in self._cluster.ledger.nodes().get(node, ()) if card.type == GPU)

    def _card(self, node: str, uuid: str | None) -> Card | None:
        return next((card for card in self._cards(node) if card.uuid == uuid), None)


def _kubelet_reason(reason: str) -> str:
    """Return the kubelet's reason for a failed Pod, such as `OutOfcpu` for kube-scheduler's `Insufficient cpu`."""
    name = "pods" if reason == "Too many pods" else reason.removeprefix("Insufficient ")
    return f"OutOf{name}" if " " not in name else "NodeAffinity"
