"""A fake API server with delayed watches, and a scheduler process without threads."""

import base64
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import jsonpatch
import orjson
from werkzeug.test import Client

from mgpu.dialects.record_verification import UNSEALED, RecordVerifier
from mgpu.kube import ApiError, Unreachable
from mgpu.model.device_object import write_device
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding, Minor
from mgpu.model.pods import Node
from mgpu.serving.metrics import Watch
from mgpu.serving.review import parse_review
from mgpu.settings import load_settings
from scheduler.announcements import Announcements
from scheduler.api.app import listeners
from scheduler.api.binding_webhook import BindingAdmission
from scheduler.api.claim_webhook import ClaimAdmission
from scheduler.claims.repair import ClaimRepair
from scheduler.claims.waker import ClaimWaker
from scheduler.cluster.cache import ClusterCache
from scheduler.cluster.events import CardsFreed, ObjectWarning, PartitionsChanged, PodResizing, PodUndecided
from scheduler.cluster.gpu_pods import GpuPod, read_gpu_pod
from scheduler.decisions.claim_decider import ClaimDecider
from scheduler.decisions.decider import Decider
from scheduler.decisions.disruption_budgets import DisruptionBudgets
from scheduler.decisions.effort_budgets import CallerGone, never
from scheduler.decisions.filter import Filter, Filtered
from scheduler.decisions.gang_filter import GangFilter
from scheduler.decisions.in_flight import PodsInFlight
from scheduler.decisions.in_flight_filter import InFlightFilter
from scheduler.decisions.late_binding import LateDecisions
from scheduler.decisions.open_claims import OpenClaims
from scheduler.decisions.pod_groups import PodGroupReader
from scheduler.decisions.preemption import Preemption
from scheduler.decisions.resizing import ResizeDecisions
from scheduler.decisions.suggestions import Suggestions
from scheduler.engine.partitioning.partitionable_node import requested_slices
from scheduler.partitioning.partition_controller import PartitionController
from scheduler.partitioning.plan_writer import PlanWriter
from tests import builders
from tests.clock import Clock

Raw = dict[str, Any]
T = TypeVar("T")
SETTINGS = load_settings()


def copied(raw: T) -> T:
    """Return a copy of an object of the API.

    State machines copy hundreds of objects in each example, and `copy.deepcopy` takes eight times as long.
    """
    found: T = orjson.loads(orjson.dumps(raw))
    return found


class FakeApi:
    """The part of `mgpu.kube.Api` that the scheduler uses. admit: the binding webhook, or None if it is down."""

    def __init__(self) -> None:
        self.pods: dict[tuple[str, str], Raw] = {}
        self.nodes: dict[str, Raw] = {}
        self.devices: dict[str, Raw] = {}
        self.configmaps: dict[str, Raw] = {}
        self.mtgpupods: dict[str, Raw] = {}
        self.resourceclaims: dict[tuple[str, str], Raw] = {}
        self.deviceclasses: dict[str, Raw] = {}
        self.resourceslices: dict[str, Raw] = {}  # no watch delivers them
        self.admit_claim: Callable[[Raw], Raw] | None = None  # the webhook for claims, or None if it is down
        self.podgroups: dict[str, list[Raw]] = {}  # By path and fieldSelector; no watch delivers them.
        self.lists = 0
        self.admit: Callable[[Raw], Raw] | None = None
        self.reachable = True
        self.broken: set[str] = set()  # kinds that cannot be read or written now
        self.between: Callable[[], object] | None = None  # called once, before the next write
        self.refuse_bindings = False
        self.refuse_allocations = False  # after the admission
        self.lost_answers = 0  # the number of the next writes of claims that take effect, but get no answer
        self.watchers: list[Callable[[str, str, Raw], None]] = []
        self.version = 0

    def put(self, kind: str, item: Raw) -> Raw:
        """Create or replace an object."""
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        meta = item["metadata"]
        self._stored(kind)[self._key(kind, meta.get("namespace", ""), meta["name"])] = item
        self._tell(kind, "changed", item)
        return item

    def remove(self, kind: str, name: str, namespace: str = "default") -> None:
        item = self._stored(kind).pop(self._key(kind, namespace, name))
        self._tell(kind, "gone", item)

    def _stored(self, kind: str) -> dict[Any, Raw]:
        found: dict[Any, Raw] = getattr(self, kind)
        return found

    def _key(self, kind: str, namespace: str, name: str) -> str | tuple[str, str]:
        return (namespace, name) if kind in ("pods", "resourceclaims") else name

    def edit_pod(self, name: str, change: Callable[[Raw], None]) -> None:
        item = copied(self.pods["default", name])
        change(item)
        self.put("pods", item)

    def pod(self, name: str) -> Raw:
        return self.pods["default", name]

    def claim(self, name: str) -> Raw:
        return self.resourceclaims["default", name]

    def edit_claim(self, name: str, change: Callable[[Raw], None]) -> None:
        item = copied(self.claim(name))
        change(item)
        self.put("resourceclaims", item)

    def annotations(self, name: str) -> dict[str, str]:
        return dict(self.pod(name)["metadata"].get("annotations") or {})

    def _tell(self, kind: str, what: str, item: Raw) -> None:
        for watcher in self.watchers:
            watcher(kind, what, copied(item))

    # What the scheduler calls.

    def get(self, path: str) -> Raw:
        self._reach()
        return copied(self._at(path))

    def list(self, path: str, **query: str) -> tuple[list[Raw], str]:
        """List PodGroups, the only objects that the scheduler reads in this way."""
        self._reach()
        self.lists += 1
        return copied(self.podgroups.get(f"{path}?{query['fieldSelector']}", [])), "1"

    def patch(self, path: str, body: Raw) -> Raw:
        self._meanwhile()
        path, *_ = path.partition("/status")
        found = copied(self._at(path))
        for key in ("uid", "resourceVersion"):
            if body.get("metadata", {}).get(key, found["metadata"][key]) != found["metadata"][key]:
                raise ApiError(409, "Conflict", key)
        if "annotations" in body.get("metadata", {}):
            annotations = found["metadata"].get("annotations") or {}
            merged = annotations | body["metadata"]["annotations"]
            found["metadata"]["annotations"] = {key: text for key, text in merged.items() if text is not None}
        for key in ("status", "data"):
            if key in body:
                found[key] = (found.get(key) or {}) | body[key]
        kind = path.split("/")[-2]
        return self._answer(self.put(kind, found)) if kind == "resourceclaims" else self.put(kind, found)

    def replace(self, path: str, body: Raw, *, dry_run: bool = False) -> Raw:
        """PUT resourceclaims/<name>/status, as kube-scheduler and the repair do."""
        return self.begin_replace(path, body, dry_run=dry_run)()

    def begin_replace(self, path: str, body: Raw, *, dry_run: bool = False) -> Callable[[], Raw]:
        """Admit a write of a claim's status. The returned function stores it, if the claim has not changed since."""
        self._meanwhile()
        path, _, subresource = path.rpartition("/")
        assert subresource == "status", path
        found = copied(self._at(path))
        new = {**found, "status": copied(body["status"])}
        version = body["metadata"].get("resourceVersion", "")
        new["metadata"] = {**found["metadata"], "resourceVersion": version}
        before = (found.get("status") or {}).get("allocation")
        if self.admit_claim and new["status"].get("allocation") and not before:
            answer = self.admit_claim(claim_review(new, found, dry_run=dry_run))["response"]
            if not answer["allowed"]:
                raise ApiError(answer["status"]["code"], "Denied", answer["status"]["message"])
            if "patch" in answer:
                new = jsonpatch.apply_patch(new, base64.b64decode(answer["patch"]))
        if version not in ("", found["metadata"]["resourceVersion"]) or self.refuse_allocations:
            raise ApiError(409, "Conflict", "resourceVersion")
        if before and new["status"].get("allocation") not in (None, before):
            raise ApiError(422, "Invalid", "status.allocation: field is immutable")
        if before and not new["status"].get("allocation"):
            new["status"].pop("devices", None)

        def store() -> Raw:
            if self._at(path)["metadata"] != found["metadata"]:
                raise ApiError(409, "Conflict", "resourceVersion")
            return new if dry_run else self._answer(self.put("resourceclaims", copied(new)))

        return store

    def _answer(self, written: Raw) -> Raw:
        if self.lost_answers:
            self.lost_answers -= 1
            raise Unreachable("no answer")
        return copied(written)

    def create(self, path: str, body: Raw) -> Raw:
        self._meanwhile()
        kind = path.rpartition("/")[2]
        if kind == "binding":
            return self.bind(path.split("/")[-2], body["target"]["name"], body)
        assert kind == "configmaps", path
        if body["metadata"]["name"] in self.configmaps:
            raise ApiError(409, "AlreadyExists", path)
        meta = {"namespace": path.split("/")[-2], "uid": f"uid-{body['metadata']['name']}", **body["metadata"]}
        return self.put(kind, {**copied(body), "metadata": meta})

    def annotate(self, node: str, **annotations: str) -> Raw:
        """Set annotations of a Node: `annotate("n1", **{"mgpu.io/slices": "…"})`."""
        return self.patch(f"/api/v1/nodes/{node}", {"metadata": {"annotations": annotations}})

    def bind(self, name: str, node: str, binding: Raw | None = None, *, dry_run: bool = False) -> Raw:
        """POST pods/<name>/binding as a scheduler does."""
        body: Raw = binding or {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
        pod = copied(self._at(f"/api/v1/namespaces/default/pods/{name}"))
        if self.admit:
            answer = self.admit(review(body, name=name, dry_run=dry_run))["response"]
            if not answer["allowed"]:
                raise ApiError(answer["status"]["code"], "Denied", answer["status"]["message"])
            if "patch" in answer:
                body = jsonpatch.apply_patch(body, base64.b64decode(answer["patch"]))
        if body["metadata"].get("uid", pod["metadata"]["uid"]) != pod["metadata"]["uid"]:
            raise ApiError(409, "Conflict", "uid")
        if pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"] or self.refuse_bindings:
            raise ApiError(409, "Conflict", "refused")
        if not dry_run:
            pod["spec"]["nodeName"] = node
            pod["metadata"]["annotations"] = {
                **(pod["metadata"].get("annotations") or {}),
                **(body["metadata"].get("annotations") or {}),
            }
            self.put("pods", pod)
        return {"kind": "Status"}

    def _at(self, path: str) -> Raw:
        *_, kind, name = path.split("/")
        if kind in self.broken:
            raise ApiError(503, "Down", path)
        parts = path.split("/")
        namespace = parts[parts.index("namespaces") + 1] if "namespaces" in parts else ""
        found = self._stored(kind).get(self._key(kind, namespace, name))
        if found is None:
            raise ApiError(404, "NotFound", path)
        return found

    def _meanwhile(self) -> None:
        self._reach()
        between, self.between = self.between, None
        if between:
            between()

    def _reach(self) -> None:
        if not self.reachable:
            raise Unreachable("no answer")


class _PlanningFilter(Filter):
    """A filter that requests plans for the pods that it is called for, as the extender does."""

    def __init__(self, replica: "Replica") -> None:
        super().__init__(replica.state, replica.settings)
        self._planning = replica.planning

    def filter(
        self, gpu_pod: GpuPod, names: Sequence[str], gone: CallerGone = never, beside: Sequence[Holding] = ()
    ) -> Filtered:
        result = super().filter(gpu_pod, names, gone, beside)
        if gpu_pod.request and requested_slices(gpu_pod.request):
            self._planning.request_plan(gpu_pod, result.repartitionable, result.passed)
        return result


class Replica:
    """A scheduler process without threads. Tests deliver events and run the controllers explicitly."""

    def __init__(
        self,
        api: FakeApi,
        clock: Clock | None = None,
        settings: Any = SETTINGS,
        records: RecordVerifier = UNSEALED,
    ) -> None:
        self.api, self.clock, self.settings = api, clock or Clock(), settings
        self.events: list[tuple[str, str, str]] = []
        self.leading = self.labelled = True
        self.freed: list[str] = []
        self.state = ClusterCache(settings, self.clock, records)
        client: Any = api
        self.now: Callable[[], float] = lambda: 1000
        self.planning = PartitionController(
            self.state,
            PlanWriter(client, settings),
            settings,
            self._warn,
            self.may_decide,
            self.clock,
            lambda: self.now(),
        )
        self.announcements = Announcements(client, self.may_decide, self.clock)
        self.while_waiting: Callable[[float], object] = self._let_time_pass
        self.flights = PodsInFlight(self.clock, lambda _changed, seconds: self.while_waiting(seconds))
        self.decider = Decider(self.state, client, settings, flights=self.flights)
        self.filter: Filter = _PlanningFilter(self)
        self.gang_filter = GangFilter(
            self.state,
            self.filter,
            self.decider,
            self.announcements.announce,
            PodGroupReader(client, self.clock),
            self.clock,
        )
        self.in_flight = InFlightFilter(self.state, self.gang_filter, self.decider, settings, self.flights, self.clock)
        self.disruption_budgets = DisruptionBudgets()
        self.preemption = Preemption(self.state, self.disruption_budgets, settings)
        self.suggestions = Suggestions(
            self.state, self.filter, self.decider, client, self.may_decide, self.planning.request_plan, self.clock
        )
        self.late = LateDecisions(
            self.state,
            self.decider,
            client,
            settings,
            self._warn,
            self.may_decide,
            self.planning,
            self.clock,
        )
        self.resizing = ResizeDecisions(self.state, client, settings, self._warn, self.may_decide, self.clock)
        self.claim_decider = ClaimDecider(self.state, client, settings, flights=self.flights, clock=self.clock)
        self.open_claims = OpenClaims(self.state, self.claim_decider)
        self.claim_repair = ClaimRepair(self.state, self.claim_decider, client, self._warn, self.may_decide, self.clock)
        self.claim_waker = ClaimWaker(self.state, self.claim_decider, client, self.may_decide, self.clock)
        self.claim_admission = ClaimAdmission(self.state, self.claim_decider, self.may_decide)
        self.state.subscribe(PodResizing, lambda event: self.resizing.add(event.uid))
        self.state.subscribe(CardsFreed, lambda event: self.freed.append(event.node))
        self.state.subscribe(PartitionsChanged, lambda event: self.planning.changed(event.node))
        self.state.subscribe(PodUndecided, lambda event: self.late.add(event.uid))
        self.state.subscribe(ObjectWarning, lambda event: self._warn(event.regarding, event.reason, event.message))
        self.admission = BindingAdmission(self.decider, self.may_decide, refusal=self.gang_filter.refusal)
        self.waiting: dict[str, deque[tuple[str, Raw]]] = {
            kind: deque()
            for kind in ("nodes", "devices", "configmaps", "pods", "mtgpupods", "deviceclasses", "resourceclaims")
        }
        everything: Any = (
            ("nodes", api.nodes),
            ("devices", api.devices),
            ("configmaps", api.configmaps),
            ("pods", api.pods),
            ("mtgpupods", api.mtgpupods),
            ("deviceclasses", api.deviceclasses),
            ("resourceclaims", api.resourceclaims),
        )
        for kind, items in everything:
            for item in items.values():
                self._take(kind, "changed", copied(item))
        self.watch()

    def watch(self) -> None:
        def keep(kind: str, what: str, item: Raw) -> None:
            if kind in self.waiting:
                self.waiting[kind].append((what, item))

        self.api.watchers.append(keep)

    def deliver(self, kind: str = "", count: int = 1_000_000) -> None:
        """Deliver events of one kind or of all, at most `count` of each."""
        for name, waiting in self.waiting.items():
            if kind in ("", name):
                for _ in range(min(count, len(waiting))):
                    what, item = waiting.popleft()
                    self._take(name, what, item)

    def settle(self) -> None:
        """Deliver events and run the controllers until nothing changes any more."""
        for _ in range(10):
            self.deliver()
            self.late.work()
            self.resizing.work()
        self.clock.now += 100
        for _ in range(10):
            self.decider.check_overdue()
            self.late.work()
            self.resizing.work()
            self.deliver()

    def _let_time_pass(self, seconds: float) -> None:
        self.clock.now += seconds

    def not_ready_reason(self) -> str | None:
        return None

    def not_deciding_reason(self) -> str | None:
        return None if self.leading else "another replica leads"

    def may_answer(self) -> None:
        """Always."""

    def may_decide(self) -> None:
        if not self.leading:
            raise RetryLater("another replica leads")

    def watches(self) -> Mapping[str, Watch]:
        return {}

    def cards_held(self) -> dict[str, list[tuple[int | str | Minor | None, int]]]:
        """pod name → (card, core in milli) of each share."""
        return {h.name: [(s.card, s.core) for s in h.shares] for h in self.state.holdings()}

    def _take(self, kind: str, what: str, item: Raw) -> None:
        if what == "gone":  # after a broken watch the reflector has only these fields
            known = ("namespace", "name", "uid", "resourceVersion")
            item = {"metadata": {key: item["metadata"][key] for key in known if key in item["metadata"]}}
        if kind == "configmaps" and item["metadata"]["name"] == self.settings.dialects.slices.config_map:
            getattr(self.planning.configs, what)(item)
        cache, name = {
            "mtgpupods": (self.state.mtgpupods, "mtgpupod"),
            "resourceclaims": (self.state.claims, "claim"),
            "deviceclasses": (self.state.claims, "class"),
        }.get(kind, (self.state, kind[:-1]))
        getattr(cache, f"{name}_{what}")(item)

    def _warn(self, regarding: Raw, reason: str, message: str) -> None:
        self.events.append((regarding["name"], reason, message))


def bind_all(replica: Replica, decided: Mapping[str, str]) -> list[str]:
    """Bind pods (UID to node), in another order than the nodes were chosen. Return the messages of refused bindings."""
    refused = []
    for uid, node in sorted(decided.items(), reverse=True):
        try:
            replica.api.bind(uid.removeprefix("uid-"), node)
        except ApiError as error:
            refused.append(error.message)
    replica.deliver()
    return refused


def reader(records: RecordVerifier = UNSEALED) -> Callable[[Raw], GpuPod | None]:
    """Return `read_gpu_pod` for machines, which ask after each step: it reads equal pods once."""
    read = lru_cache(maxsize=1024)(lambda text: read_gpu_pod(orjson.loads(text), SETTINGS, records))
    return lambda raw: read(orjson.dumps(raw))


def review(binding: Raw, *, name: str = "", resource: str = "pods/binding", dry_run: bool = False) -> Raw:
    """Return an AdmissionReview of a Binding."""
    top, _, sub = resource.partition("/")
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "review-1",
            "kind": {"group": "", "version": "v1", "kind": "Binding"},
            "resource": {"group": "", "version": "v1", "resource": top},
            "subResource": sub,
            "namespace": "default",
            "name": name,
            "operation": "CREATE",
            "userInfo": {"username": "someone"},
            "object": copied(binding),
            "dryRun": dry_run,
        },
    }


def claim_review(claim: Raw, old: Raw, *, dry_run: bool = False) -> Raw:
    """Return an AdmissionReview of a write to the status of a ResourceClaim."""
    found = review(claim, name=claim["metadata"]["name"], resource="resourceclaims/status", dry_run=dry_run)
    found["request"]["resource"].update(group="resource.k8s.io")
    found["request"].update(
        kind={"group": "resource.k8s.io", "version": "v1", "kind": "ResourceClaim"},
        operation="UPDATE",
        oldObject=copied(old),
    )
    return found


def clients(replica: Replica) -> tuple[Client, Client]:
    """Return HTTP clients of the admission and the extender."""
    process: Any = replica
    admission, extender = listeners(process)
    return Client(admission.app), Client(extender.app)


def doors() -> tuple[Client, Client]:
    """Return HTTP clients of a cluster with a node, two cards and a pod `p`."""
    replica = Replica(cluster(("n1", 2)))
    replica.api.put("pods", builders.share("p"))
    replica.deliver()
    return clients(replica)


def cluster(*cards: tuple[str, int]) -> FakeApi:
    """Return an API server with nodes and cards of 80 GiB: `cluster(("n1", 2), ("n2", 1))`."""
    api = FakeApi()
    for name, count in cards:
        api.put("nodes", builders.node(name))
        api.put("devices", write_device(Node(name), "", builders.cards(count, node=name)))
    return api


def admitted(replica: Replica) -> Callable[[Raw], Raw]:
    """Return the binding webhook as a function from AdmissionReview to AdmissionReview."""
    return lambda raw: dict(replica.admission(parse_review(json.dumps(raw).encode())).body)


def admitted_claims(replica: Replica) -> Callable[[Raw], Raw]:
    """Return the webhook for claims as a function from AdmissionReview to AdmissionReview."""
    return lambda raw: dict(replica.claim_admission(parse_review(json.dumps(raw).encode())).body)
