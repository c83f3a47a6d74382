"""Serves the verbs of Volcano's plugin `extender` (volcano.sh, pkg/scheduler/plugins/extender).

Volcano counts the GPUs of a node as a sum, and places the pods of a gang one after the other in a session. `predicate`
tells it on which nodes the cards suffice. `allocate` reserves the cards of each pod, so that the next pod of the gang
is placed with the cards that are left. If the gang is given up, `deallocate` withdraws the reservations. The other
verbs are optional. Without `predicate`, Volcano learns only from a refused `allocate` that the cards of a node do not
suffice, so `decisions.suggestions` suggests a node then. `api.app` serves the verbs on an address of their own.

Volcano takes every status but 200 as an error, so errors are part of the replies. The keys of a task have the names of
Go's fields, because Volcano's types have no JSON tags. `task.Pod` is taken only as the name of a pod: Volcano sets its
`spec.nodeName` when it considers a node, and does not clear it.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from flask import Flask

from mgpu.model.errors import BadObject, Problem, RetryLater
from mgpu.model.gpu_requests import Rejection, RejectionKind
from mgpu.model.pods import read_pod
from mgpu.model.raw_objects import table_at
from mgpu.serving.app import new_app, serve_posts
from mgpu.serving.deadlines import watch_client
from mgpu.serving.posts import read_body
from mgpu.serving.request_memory import EXTENDER
from mgpu.serving.review import BadRequest, Reply
from scheduler import metrics
from scheduler.api.extender import Body, decode_object
from scheduler.api.replica import Replica
from scheduler.api.volcano_nodes import SeenNode, SeenNodes, evicts_all
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.decisions.effort_budgets import CallerGone, EffortExceeded, never
from scheduler.decisions.filter import Filtered
from scheduler.decisions.preemption import Outlook
from scheduler.decisions.suggestions import WaitingPod
from scheduler.engine.partitioning.partitionable_node import requested_slices

Verb = Callable[[Body, CallerGone], dict[str, Any]]

_TOKEN = re.compile(r"[A-Za-z0-9]{32,}")
_POINTS = 10
"""The score of Volcano's own plugins is at most 100 (k8s.io/kube-scheduler MaxNodeScore). mgpu's is at most 10."""
_OF_THE_POD = frozenset(
    (RejectionKind.BINDINGS_FAIL, RejectionKind.BOUND_ALREADY, RejectionKind.GATED, RejectionKind.MALFORMED)
)
"""The kinds of rejections that no other node would change."""
_MAX_ROUNDS = 100
"""The most pods whose predicates are collected at a time."""
_PROMISED = "what is free here is promised to pods that wait for evicted ones"


class Code(IntEnum):
    """Why a node is not possible (volcano.sh/volcano/pkg/scheduler/api, `Status`)."""

    ERROR = 1
    UNSCHEDULABLE = 2
    UNSCHEDULABLE_AND_UNRESOLVABLE = 3


class TaskStatus(IntEnum):
    """The statuses of a task for which something is done here (volcano.sh/volcano/pkg/scheduler/api, `TaskStatus`)."""

    PENDING = 1
    ALLOCATED = 2
    PIPELINED = 4
    RELEASING = 64


class Vote(IntEnum):
    """What a plugin says about victims (volcano.sh/volcano/pkg/scheduler/plugins/util)."""

    REJECT = -1
    ABSTAIN = 0
    PERMIT = 1


class Task(NamedTuple):
    """A task of a session: a pod that Volcano places.

    Attributes:
        pod: The pod as an object.
        node: The node that Volcano has chosen; "" if it has chosen none.
        nominated_node: The node to which the pod was nominated when Volcano read it; "" for none.
        job: The name of the pod's group; "" if it has none.
        status: See `TaskStatus`.
    """

    namespace: str
    name: str
    uid: str
    pod: Mapping[str, Any]
    node: str
    nominated_node: str
    job: str
    status: object

    def as_suggested(self) -> WaitingPod:
        return WaitingPod(
            self.uid, self.namespace, self.nominated_node, self.job, table_at(self.pod, "spec", "nodeSelector")
        )


class VolcanoExtender:
    """Implements the verbs. Each takes the body of a request, and returns an object that is sent as JSON.

    Each verb raises BadRequest for a malformed body, and RetryLater or EffortExceeded if it cannot answer now.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._decider = replica.decider
        self._rounds = _Rounds()
        self._seen = SeenNodes()

    def predicate(self, body: Body, gone: CallerGone = never) -> dict[str, Any]:
        """Answer whether the task's pod fits on a node: `{}`, or the reason with its `Code`.

        In the action `preempt` Volcano evicts one task after the other until the predicate passes. The pods still run
        at that time, and only the tasks of the request tell which of them the session has evicted.
        """
        arguments = decode_object(body)
        task, node = _task(arguments, "task"), _name(arguments.get("node"), "node.Name")
        gpu_pod = self._gpu_pod(task)
        if gpu_pod is None:
            result = self._replica.filter.filter_without_request(read_pod(task.pod), [node])
        else:
            result = self._replica.filter.filter(gpu_pod, [node], gone)
            self._collect(gpu_pod, node, result)
            outlook = self._outlook(arguments["node"], task)
            may_need_victims = outlook is not None or not result.passed
            self._seen.put(task.uid, node, SeenNode.of(arguments, outlook) if may_need_victims else None)
            if outlook is not None and node not in result.hopeless:
                fits = bool(result.passed or outlook.leaving)
                if fits and self._replica.preemption.choose_among(gpu_pod, node, (), gone, outlook) is not None:
                    return {}
                return {"status": result.failed.get(node, _PROMISED), "code": Code.UNSCHEDULABLE}
        if result.passed:
            return {}
        if node in result.hopeless:
            return {"status": result.hopeless[node], "code": Code.UNSCHEDULABLE_AND_UNRESOLVABLE}
        return {"status": result.failed[node], "code": Code.UNSCHEDULABLE}

    def allocate(self, body: Body, gone: CallerGone = never) -> dict[str, Any]:
        """Reserve the cards of a task on its node, or answer why there are none, and suggest another node.

        Volcano calls the verb for pipelined tasks, too. These wait for the end of other pods, so nothing is reserved.
        """
        task = _task(decode_object(body), "task")
        if task.status != TaskStatus.ALLOCATED or not task.node:
            return {"errorMessage": ""}
        gpu_pod = self._gpu_pod(task)
        if gpu_pod is None:
            return {"errorMessage": ""}
        self._rounds.drop(task.uid)
        decision = self._decider.decide(gpu_pod, task.node, provisional=True, gone=gone)
        # This is checked again, because the process may have been suspended and another replica may lead by now.
        self._replica.may_decide()
        if isinstance(decision, Rejection):
            if decision.kind not in _OF_THE_POD:
                self._replica.suggestions.refused(task.as_suggested(), task.node)
            return {"errorMessage": f"no cards for this pod on {task.node}: {decision}"}
        return {"errorMessage": ""}

    def deallocate(self, body: Body, _gone: CallerGone = never) -> dict[str, Any]:
        """Withdraw the reservation of a task that Volcano has given up.

        Volcano calls the verb for tasks that it evicts, too. They have no reservation that can be withdrawn.
        """
        task = _task(decode_object(body), "task")
        if task.status == TaskStatus.PENDING:
            self._replica.may_decide()
            if self._replica.state.reservations.withdraw(task.uid, task.node):
                self._replica.suggestions.given_up(task.as_suggested(), task.node)
        return {"errorMessage": ""}

    def prioritize(self, body: Body, gone: CallerGone = never) -> dict[str, Any]:
        """Answer with a score from 0 to 100 for each node."""
        arguments = decode_object(body)
        gpu_pod = self._gpu_pod(_task(arguments, "task"))
        names = [_name(node, "nodes[].Name") for node in _list(arguments, "nodes")]
        scores = self._replica.filter.scores(gpu_pod, names, gone) if gpu_pod else [0] * len(names)
        points = {name: float(score * _POINTS) for name, score in zip(names, scores, strict=True)}
        return {"nodeScore": points, "errorMessage": ""}

    def preemptable(self, body: Body, gone: CallerGone = never) -> dict[str, Any]:
        """Answer which of the tasks on a node must be evicted so that the evictor gets its cards there.

        Volcano has chosen the tasks by priority or queue, and evicts those on which all plugins agree. The victims are
        returned as they came, because Volcano takes the replied tasks instead of its own.
        """
        return self._victims(body, gone)

    def reclaimable(self, body: Body, gone: CallerGone = never) -> dict[str, Any]:
        """Answer like `preemptable`, but with no victims on a node where Volcano would not evict all of them.

        Volcano evicts pods of other queues until the sums suffice, and calls no predicate meanwhile.
        """
        return self._victims(body, gone, by_sums=True)

    def _victims(self, body: Body, gone: CallerGone, *, by_sums: bool = False) -> dict[str, Any]:
        arguments = decode_object(body)
        evictor = _task(arguments, "evictor")
        gpu_pod = self._gpu_pod(evictor)
        if gpu_pod is None:
            return {"status": Vote.ABSTAIN, "victims": []}
        tasks = [(_read_task(raw, "evictees[]"), raw) for raw in _list(arguments, "evictees")]
        victims: list[Mapping[str, Any]] = []
        for node in sorted({task.node for task, _ in tasks}):
            uids = tuple(task.uid for task, _ in tasks if task.node == node)
            seen = self._seen.get(evictor.uid, node)
            chosen = self._replica.preemption.choose_among(gpu_pod, node, uids, gone, seen and seen.outlook)
            here = [raw for task, raw in tasks if chosen and task.uid in chosen]
            if not by_sums or seen is None or evicts_all(arguments["evictor"], here, seen.free):
                victims += here
        return {"status": Vote.PERMIT, "victims": victims}

    def _gpu_pod(self, task: Task) -> GpuPod | None:
        """Return the pod of a task, or None if it requests no GPU."""
        self._replica.may_answer()
        found = self._decider.find(task.namespace, task.name, task.uid)
        if found is None:
            raise BadRequest(404, f"there is no pod {task.namespace}/{task.name} with uid {task.uid}")
        if found.gpu_pod is not None:
            # Only the replica that decides has the reservations.
            self._replica.may_decide()
        return found.gpu_pod

    def _outlook(self, node: Mapping[str, Any], task: Task) -> Outlook | None:
        """Return what the session has decided about a node: which pods leave it, and which wait for their cards.

        The result is None if the session has evicted no pod of the node, and has promised no cards. Then pods that are
        being deleted keep their cards until they have ended, so that no pod is allocated too early.
        """
        others = [raw for raw in table_at(node, "Tasks").values() if isinstance(raw, dict)]
        releasing = [_read_task(raw, "node.Tasks") for raw in others if raw.get("Status") == TaskStatus.RELEASING]
        pipelined = [_read_task(raw, "node.Tasks") for raw in others if raw.get("Status") == TaskStatus.PIPELINED]
        evicts = any(not table_at(other.pod, "metadata").get("deletionTimestamp") for other in releasing)
        coming = tuple(filter(None, (self._replica.state.gpu_pod(p.uid) for p in pipelined if p.uid != task.uid)))
        if not evicts and not coming:
            return None
        return Outlook(frozenset(other.uid for other in releasing) if evicts else frozenset(), coming)

    def _collect(self, gpu_pod: GpuPod, node: str, result: Filtered) -> None:
        """Collect the predicates of a pod that requests slices, and request a plan once all its nodes were asked."""
        if not gpu_pod.request or not requested_slices(gpu_pod.request):
            return
        finished = self._rounds.add(gpu_pod.pod.uid, node, bool(result.passed), bool(result.repartitionable))
        if finished is not None:
            passed = [name for name, (fits, _) in finished.items() if fits]
            repartitionable = [name for name, (_, would_fit) in finished.items() if would_fit]
            self._replica.planning.request_plan(gpu_pod, repartitionable, passed)


_Answers = dict[str, tuple[bool, bool]]
"""By node, whether the pod fits there, and whether it would fit if the cards were partitioned again."""


class _Rounds:
    """Collects the predicates of each pod, which come node by node. Thread-safe.

    A session asks for each node once. So if a node is asked for again, a new session has begun, and the round of the
    last one is finished. A pod that gets a node has no such round, because `allocate` drops it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._answers: OrderedDict[str, _Answers] = OrderedDict()

    def add(self, uid: str, node: str, fits: bool, would_fit: bool) -> _Answers | None:
        """Add an answer. Return the last round if it is finished."""
        with self._lock:
            answers = self._answers.setdefault(uid, {})
            finished = answers if node in answers else None
            if finished is not None:
                self._answers[uid] = answers = {}
            answers[node] = fits, would_fit
            self._answers.move_to_end(uid)
            if len(self._answers) > _MAX_ROUNDS:
                self._answers.popitem(last=False)
            return finished

    def drop(self, uid: str) -> None:
        with self._lock:
            self._answers.pop(uid, None)


def read_token(path: str) -> str:
    """Return the token in the file `scheduler.volcanoTokenFile`. Raises BadObject if it cannot be used."""
    field = "scheduler.volcanoTokenFile"
    if not path:
        raise BadObject([Problem(field, "is required if scheduler.volcanoPort is set")])
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadObject([Problem(field, f"cannot be read: {error}")]) from error
    if not _TOKEN.fullmatch(token):
        raise BadObject([Problem(field, "must contain a token of at least 32 letters and digits")])
    return token


def make_app(extender: VolcanoExtender, token: str, seconds: float) -> Flask:
    """Return the app of the verbs at `/TOKEN/VERB`.

    Volcano sends no credentials, so the path has a token. Callers without it get 404.

    Args:
        seconds: The time for which Volcano waits for an answer (`extender.httpTimeout`).
    """
    app = new_app(EXTENDER)

    def add(name: str, verb: Verb, failure: Callable[[str], dict[str, Any]]) -> None:
        duration = metrics.EXTENDER.labels(name)

        def answer() -> Reply:
            try:
                with duration.time(), read_body() as data:
                    return Reply(verb(data, watch_client(seconds)))
            except (BadObject, BadRequest, EffortExceeded, RetryLater) as error:
                return Reply(failure(str(error)))

        serve_posts(app, f"/{token}/{name}", answer)

    def no_victims(_reason: str) -> dict[str, Any]:
        return {"status": Vote.REJECT, "victims": []}

    add("predicate", extender.predicate, lambda reason: {"status": reason, "code": Code.ERROR})
    add("allocate", extender.allocate, lambda reason: {"errorMessage": reason})
    add("deallocate", extender.deallocate, lambda reason: {"errorMessage": reason})
    add("prioritize", extender.prioritize, lambda reason: {"nodeScore": {}, "errorMessage": reason})
    add("preemptable", extender.preemptable, no_victims)
    add("reclaimable", extender.reclaimable, no_victims)
    return app


def _task(arguments: Mapping[str, Any], key: str) -> Task:
    return _read_task(arguments.get(key), key)


def _read_task(raw: object, path: str) -> Task:
    if not isinstance(raw, dict) or not isinstance(pod := raw.get("Pod"), dict):
        raise BadRequest(400, f"{path}.Pod must be an object")
    meta = table_at(pod, "metadata")
    namespace, name, uid = (_text(meta.get(key), f"{path}.Pod.metadata.{key}") for key in ("namespace", "name", "uid"))
    texts = (raw.get("NodeName"), table_at(pod, "status").get("nominatedNodeName"), raw.get("Job"))
    node, nominated, job = (text if isinstance(text, str) else "" for text in texts)
    return Task(namespace, name, uid, pod, node, nominated, job, raw.get("Status"))


def _list(arguments: Mapping[str, Any], key: str) -> Sequence[Any]:
    """Return a list. Go writes an empty one as null."""
    value = arguments.get(key)
    if value is not None and not isinstance(value, list):
        raise BadRequest(400, f"{key} must be a list")
    return value or ()


def _name(node: object, path: str) -> str:
    return _text(node.get("Name") if isinstance(node, dict) else None, path)


def _text(value: object, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest(400, f"{path} must be a non-empty string")
    return value
