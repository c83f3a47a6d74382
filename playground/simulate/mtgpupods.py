"""MtgpuPods in a simulation: the scheduler's own plan for them, carried out at once.

Source: docs/design/mtgpu.md, "Controller".
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mgpu.dialects import mtgpu
from mgpu.dialects.mtgpu_pods import manifest as own_pod
from mgpu.model.cards import GPU, Card
from mgpu.model.ledger import Holding
from mgpu.model.pods import Pod, read_pod
from mgpu.presentation.card_views import percent
from mgpu.presentation.mtgpupod_tables import by_container, missing_card, read_all
from mgpu.settings import Settings
from playground.simulate.accounts import Accounts
from playground.simulate.outcomes import Outcome
from playground.simulate.world import Raw
from scheduler.cluster.gpuids import Bound, Used
from scheduler.engine import nvidia_plugin
from scheduler.mtgpupods.node_plan import plan
from scheduler.mtgpupods.observed_node import Seen
from scheduler.mtgpupods.occupy_pods import Create, Delete, Occupy
from scheduler.mtgpupods.occupy_pods import manifest as occupy_pod
from scheduler.mtgpupods.outcome import Verdict
from scheduler.mtgpupods.owned_pods import Made, made_for, read_made

_NOT_SERVED = "MtgpuPods are not enabled in the settings"


@dataclass(slots=True)
class _Row:
    """An MtgpuPod that is there. outcome: of a submitted one. made: its own Pod."""

    pod: mtgpu.MtgpuPod
    raw: Raw
    outcome: Outcome | None = None
    made: Made | None = None


class MtgpuPods:
    """names: every Pod that there is, by `namespace/name`. submit: has a Pod placed as any other, with an outcome.

    unfit: why the kubelet of a node would not start a Pod, with so many others that come before it ("": it would).
    """

    def __init__(
        self,
        accounts: Accounts,
        settings: Settings,
        names: dict[str, Raw],
        submit: Callable[[Raw], object],
        unfit: Callable[[Raw, str, int], str],
    ) -> None:
        self._accounts, self._settings, self._names = accounts, settings, names
        self._submit, self._unfit = submit, unfit
        self._rows: dict[str, _Row] = {}
        self._admitted: dict[str, Holding] = {}
        self._occupies: dict[tuple[str, str], Occupy] = {}
        self._submitted = 0

    def take_in(self, bound: Iterable[Raw], pods: Sequence[Raw], note: Callable[[str], None]) -> None:
        """Those that have their card already. pods: all that have a node."""
        raws = {raw["metadata"]["uid"]: raw for raw in bound}
        found = read_all(raws.values(), pods)
        for what, why in found.unclear.items():
            note(f"{what}: {why}")
        for holding in found.holdings:
            self._accounts.hold(holding)
        for view in found.views:
            odd = missing_card(view, self._cards(view.pod.node))
            if odd:
                note(f"MtgpuPod {view.pod.key}: {odd}")
            self._rows[view.pod.uid] = self._running(_Row(view.pod, raws[view.pod.uid]))

    def _running(self, row: _Row) -> _Row:
        there, card = self._names.get(row.pod.key), self._card(row.pod.node, row.pod.bound)
        if there is not None and made_for(there, row.pod.uid, row.pod.pod_uid):
            row.made = Made(there["metadata"]["uid"], "Running", card=row.pod.bound)
        elif there is None and card is not None:
            self._make(row, card)
        return row

    def settle(self) -> None:
        """Once everything that runs is known."""
        for node in sorted({row.pod.node for row in self._rows.values()}):
            self._settle(node)

    def follow(self, pod: Pod, message: str = "") -> None:
        """A Pod that is there now, of whatever kind; without a node it waits, and `message` says for what."""
        node, gpuid = mtgpu.occupied(pod) or ("", "")
        if gpuid and pod.node in ("", node):
            phase = pod.phase if pod.ended else "Running" if pod.node else "Pending"
            holding = self._accounts.ledger.holding(pod.uid)
            cards = (card.uuid for card in self._cards(node) if holding and holding.is_known_on(card))
            self._occupies[node, gpuid] = Occupy(pod.uid, True, phase, pod.deleting, next(cards, ""), message)

    def submit(self, raw: Raw, outcome: Outcome) -> None:
        """An MtgpuPod that was admitted. They come in the order in which they are submitted, whatever they say."""
        outcome.phase = "Pending"
        if not mtgpu.enabled(self._settings):
            outcome.rejections = {outcome.pod.node: _NOT_SERVED}
            return
        self._submitted += 1
        pod = replace(mtgpu.read_mtgpupod({**raw, "status": {}}), created=f"{self._submitted:09}")
        there = self._names.get(pod.key)
        made = read_made(there) if there is not None and made_for(there, pod.uid, pod.pod_uid) else None
        self._rows[pod.uid] = _Row(pod, raw, outcome, made)
        self._settle(pod.node)

    def tell_containers(self) -> None:
        """At the end: the accounts name the containers of each."""
        for row in self._rows.values():
            holding = self._accounts.ledger.holding(row.pod.uid)
            if holding:
                self._accounts.hold(by_container(holding, read_pod(row.raw)))

    def _settle(self, node: str) -> None:
        while self._step(node):
            pass

    def _step(self, node: str) -> bool:
        """Do what the plan for a node says; whether it has to be planned again."""
        planned = plan(self._seen(node))
        starting = {step.gpuid for step in planned.occupy if isinstance(step, Create)}
        for held in planned.holdings:
            if self._refused(self._rows[held.uid], int(held.gpuid in starting)):
                return True
        self._admit(node, planned.holdings)
        again = [self._occupy(node, step) for step in planned.occupy]
        again += [self._bind(self._rows[uid], verdict) for uid, verdict in planned.verdicts.items()]
        for uid, verdict in planned.verdicts.items():
            self._tell(self._rows[uid], verdict)
        return any(again)

    def _seen(self, node: str) -> Seen:
        known = self._accounts.nodes[node]
        rows = {uid: row for uid, row in self._rows.items() if row.pod.node == node}
        own = {uid: row.made for uid, row in rows.items() if row.made}
        occupies = {gpuid: occupy for (of, gpuid), occupy in self._occupies.items() if of == node}
        for gpuid in {row.pod.gpuid for row in rows.values()} - set(occupies):
            there = self._names.get(f"{mtgpu.OCCUPY_NAMESPACE}/{mtgpu.occupy_name(node, gpuid)}")
            if there is not None:
                occupies[gpuid] = Occupy(there["metadata"]["uid"], ours=False)
        return Seen(
            node,
            tuple(row.pod for row in rows.values()),
            self._cards(node),
            self._accounts.ledger.holdings(node),
            unschedulable=bool((self._accounts.raw[node].get("spec") or {}).get("unschedulable")),
            stock=nvidia_plugin.is_there(known),
            made=own,
            conflicts=frozenset(uid for uid, row in rows.items() if uid not in own and row.pod.key in self._names),
            occupies=occupies,
            admitted={uid: held for uid, held in self._admitted.items() if held.node == node},
            bound=self._bound(node, {row.pod.namespace for row in rows.values()}),
        )

    def _bound(self, node: str, namespaces: set[str]) -> Bound | None:
        most = self._settings.dialects.mtgpu.max_gpuids
        if most is None:
            return None
        return Bound(most, Used(self._accounts.ledger.holdings()).elsewhere(namespaces, node))

    def _refused(self, row: _Row, before: int) -> bool:
        """No scheduler looks at its cpu and memory: its Pod has a node from the start, and the kubelet fails it."""
        why = self._unfit(row.raw, row.pod.node, before)
        if not why or row.outcome is None:
            return False
        row.outcome.phase, row.outcome.reason = "Failed", _word(why)
        row.outcome.rejections = {row.pod.node: f"its kubelet does not start the Pod: {why}"}
        del self._rows[row.pod.uid]
        self._admitted.pop(row.pod.uid, None)
        self._accounts.release(row.pod.uid)
        return True

    def _admit(self, node: str, holdings: Sequence[Holding]) -> None:
        for uid in [uid for uid, held in self._admitted.items() if held.node == node]:
            del self._admitted[uid]
            self._accounts.release(uid)
        for held in holdings:
            self._admitted[held.uid] = held
            self._accounts.hold(held)

    def _occupy(self, node: str, step: Create | Delete) -> bool:
        """Those that nobody needs yet stay: a later MtgpuPod of the files does."""
        if isinstance(step, Delete):
            gone = self._occupies[node, step.gpuid].ended
            if gone:
                del self._occupies[node, step.gpuid]
                del self._names[f"{mtgpu.OCCUPY_NAMESPACE}/{mtgpu.occupy_name(node, step.gpuid)}"]
            return gone
        raw = occupy_pod(node, step.gpuid, self._settings)
        raw["metadata"]["uid"] = f"{mtgpu.OCCUPY_NAMESPACE}/{raw['metadata']['name']}"
        # NVIDIA's plugin gives it any free card: what is held of all of them for this GPUID until then is no bar to it.
        waiting = [
            h for h in self._admitted.values() if (h.node, h.gpuid, h.shares[0].card) == (node, step.gpuid, None)
        ]
        for held in waiting:
            self._accounts.release(held.uid)
        self._submit(raw)
        for held in waiting:
            self._accounts.hold(held)
        return True

    def _bind(self, row: _Row, verdict: Verdict) -> bool:
        new = bool(verdict.bind) and not row.pod.bound
        if new:
            row.pod = replace(row.pod, bound=verdict.bind)
            self._admitted.pop(row.pod.uid, None)
            self._accounts.hold(mtgpu.holding(row.pod, verdict.bind))
        make = verdict.make and row.made is None
        if make and verdict.card:
            self._make(row, verdict.card)
        return new or make

    def _make(self, row: _Row, card: Card) -> None:
        """Its own Pod, which runs at once."""
        raw = own_pod(row.raw, row.pod, card.uuid, card.index)
        uid = f"{row.pod.uid}/pod"
        raw["metadata"]["uid"] = uid
        self._names[row.pod.key] = raw
        self._accounts.reserve(read_pod(raw), raw, row.pod.node)
        row.made = Made(uid, "Running", card=card.uuid)

    def _tell(self, row: _Row, verdict: Verdict) -> None:
        outcome, said = row.outcome, verdict.bound
        if outcome is None:
            return
        card = self._card(row.pod.node, row.pod.bound) if row.made else None
        if card is None:
            said = verdict.created if row.pod.bound else said
            outcome.reason = said.reason if said else ""
            outcome.rejections = {row.pod.node: said.message} if said else {}
            return
        outcome.phase, outcome.reason, outcome.node, outcome.rejections = "Running", "Bound", row.pod.node, {}
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
        """The GPUs that are not cut."""
        return tuple(card for card in self._accounts.ledger.nodes().get(node, ()) if card.type == GPU)

    def _card(self, node: str, uuid: str) -> Card | None:
        return next((card for card in self._cards(node) if card.uuid == uuid), None)


def _word(why: str) -> str:
    """The reason that a kubelet gives, for kube-scheduler's words."""
    name = "pods" if why == "Too many pods" else why.removeprefix("Insufficient ")
    return f"OutOf{name}" if " " not in name else "NodeAffinity"
