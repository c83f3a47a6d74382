"""kube-scheduler's extender protocol: `/filter`, `/prioritize`, `/preempt` and `/bind`.

Source: k8s.io/kube-scheduler/extender/v1, and docs/design/kubernetes.md, "kube-scheduler's extender". This module
translates between JSON and the modules of `scheduler/decisions`, and decides nothing itself. The Go types have no JSON
tags: requests may spell keys in any case, and replies have capitalised keys.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any, Protocol

import orjson
from flask import Flask, Response

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.errors import BadObject, RetryLater
from mgpu.model.gpu_requests import Rejection
from mgpu.model.pods import read_pod
from mgpu.serving.app import new_app, read_body
from mgpu.serving.deadlines import watch_client
from mgpu.serving.request_memory import EXTENDER
from mgpu.serving.review import BadRequest
from scheduler import metrics
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.decider import Decider, pod_path
from scheduler.decisions.effort_budgets import CallerGone, EffortExceeded, never
from scheduler.decisions.filter import Filter, Filtered
from scheduler.decisions.preemption import Preemption, Victims

_NODES_COUNTED = 500

Body = bytes | bytearray


class Gate(Protocol):
    """What this replica may do now. Implemented by `scheduler.runtime.Process`."""

    def not_ready_reason(self) -> str | None:
        """Return why it cannot answer yet, or None where it can."""

    def not_deciding_reason(self) -> str | None:
        """Return why it does not decide, or None where it does."""

    def may_answer(self) -> None:
        """Raise RetryLater with the reason unless it may answer from the cache."""

    def may_decide(self) -> None:
        """Raise RetryLater with the reason unless it may decide and write."""


class Extender:
    """The four verbs, each from the body of a request to an object that is sent as JSON.

    Each raises BadRequest for a malformed body, and RetryLater where this replica cannot answer now. `gone` tells
    whether kube-scheduler has given up waiting.
    """

    def __init__(
        self,
        filter_: Filter,
        decider: Decider,
        preemption: Preemption,
        api: Api,
        gate: Gate,
    ) -> None:
        self._filter = filter_
        self._decider = decider
        self._preemption = preemption
        self._api = api
        self._gate = gate

    def filter(self, body: Body, gone: CallerGone = never) -> dict[str, Any]:
        """Answer an ExtenderArgs with an ExtenderFilterResult."""
        known, raw, names, nodes = self._scheduling(body)
        found = self._filter.filter(known, names, gone) if known else self._filter.pass_on(read_pod(raw), names)
        if known and not found.passed:
            _count_nowhere(found)
        answer: dict[str, Any] = {
            "FailedNodes": found.failed,
            "FailedAndUnresolvableNodes": found.hopeless,
            "Error": "",
        }
        if nodes is None:
            return {"NodeNames": found.passed, **answer}
        return {"Nodes": {"items": [nodes[name] for name in found.passed]}, **answer}

    def prioritize(self, body: Body, gone: CallerGone = never) -> list[dict[str, Any]]:
        """Answer an ExtenderArgs with a HostPriorityList: 0 to 10 points for each node."""
        known, _, names, _ = self._scheduling(body)
        scores = self._filter.scores(known, names, gone) if known else [0] * len(names)
        return [{"Host": name, "Score": score} for name, score in zip(names, scores, strict=True)]

    def preempt(self, body: Body, gone: CallerGone = never) -> dict[str, Any]:
        """Answer an ExtenderPreemptionArgs: choose victims on the nodes where kube-scheduler has found some itself."""
        arguments = _arguments(body)
        proposed = _victims(arguments.get("nodenametometavictims"), arguments.get("nodenametovictims"))
        known = self._pod(arguments.get("pod"))
        found = self._preemption.choose(known, arguments["pod"], proposed, gone) if known else proposed
        rows = {
            name: {"Pods": [{"UID": uid} for uid in victims.uids], "NumPDBViolations": victims.violations}
            for name, victims in found.items()
        }
        return {"NodeNameToMetaVictims": rows}

    def bind(self, body: Body, gone: CallerGone = never) -> dict[str, str]:
        """Answer an ExtenderBindingArgs: decide the cards and post the Binding with the allocation record.

        A replica that does not decide posts the Binding without it. The admission of Bindings then decides, at the
        replica to which the Service leads.
        """
        arguments = _arguments(body)
        namespace, name, uid, node = (_text(arguments, key) for key in ("PodNamespace", "PodName", "PodUID", "Node"))
        self._gate.may_answer()
        found, known = self._decider.find(namespace, name, uid)
        if not found:
            return {"Error": f"there is no pod {namespace}/{name} with uid {uid}"}
        decision = self._decide(known, node, gone) if known else None
        if isinstance(decision, str):
            return {"Error": f"no cards for this pod on {node}: {decision}"}
        return {"Error": self._post(namespace, name, found, node, decision)}

    def _decide(self, known: GpuPod, node: str, gone: CallerGone) -> Reservation | str | None:
        try:
            self._gate.may_decide()
        except RetryLater:
            return None
        try:
            found = self._decider.decide(known, node, gone=gone)
        except EffortExceeded as error:
            return str(error)
        try:
            # Checked again: the process may have been suspended meanwhile, and another replica may lead by now.
            self._gate.may_decide()
        except RetryLater:
            return None
        return str(found) if isinstance(found, Rejection) else found

    def _post(self, namespace: str, name: str, uid: str, node: str, decision: Reservation | None) -> str:
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "namespace": namespace,
                "name": name,
                "uid": uid,
                "annotations": dict(decision.annotations) if decision else {},
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        try:
            self._api.create(f"{pod_path(namespace, name)}/binding", binding)
        except ApiError as error:
            if decision:
                self._decider.check(decision)
            return str(error)
        except Unreachable as error:
            return f"whether the pod is bound is not known: {error}"
        return ""

    def _scheduling(self, body: Body) -> tuple[GpuPod | None, object, list[str], Mapping[str, Any] | None]:
        """Return the pod, or None where it requests no GPU; the pod as JSON; the names of the nodes; and the Nodes by
        name, or None where the call has names only (`nodeCacheCapable`).
        """
        arguments = _arguments(body)
        names = arguments.get("nodenames")
        nodes = None
        if names is None:
            nodes = _nodes(arguments.get("nodes"))
            names = list(nodes)
        if not isinstance(names, list) or set(map(type, names)) - {str}:
            raise BadRequest(400, "NodeNames must be a list of strings")
        raw = arguments.get("pod")
        return self._pod(raw), raw, names, nodes

    def _pod(self, raw: object) -> GpuPod | None:
        """Return the pod of a call, or None where it requests no GPU."""
        if not isinstance(raw, dict):
            raise BadRequest(400, "Pod must be an object")
        self._gate.may_answer()
        try:
            return self._decider.read(raw)
        except BadObject as error:
            raise BadRequest(400, f"Pod is not a valid Pod: {error}") from error


def make_app(extender: Extender, seconds: float = 10.0) -> Flask:
    """Return the app of the extender. seconds: how long kube-scheduler waits for an answer (`httpTimeout`)."""
    app = new_app(EXTENDER)
    for verb in (extender.filter, extender.prioritize, extender.preempt, extender.bind):
        app.add_url_rule(f"/{verb.__name__}", verb.__name__, posted(verb, seconds), methods=["POST"])
    return app


def posted(verb: Any, seconds: float) -> Any:
    """Return the Flask view of one verb, which also measures its time."""
    took = metrics.EXTENDER.labels(verb.__name__)

    def answer() -> Response:
        with took.time(), read_body() as sent:
            return Response(orjson.dumps(verb(sent, watch_client(seconds))), mimetype="application/json")

    return answer


def _count_nowhere(found: Filtered) -> None:
    """Count a pod that fits on no node, by the kind of the commonest reason.

    Of thousands of nodes the first few hundred tell. Nodes where evictions could help count first.
    """
    reasons = Counter(islice(chain(found.failed.values(), found.hopeless.values()), _NODES_COUNTED))
    for reason, _ in reasons.most_common(1):
        metrics.REJECTIONS.labels("filter", found.kinds[reason]).inc()


def _victims(meta: object, full: object) -> dict[str, Victims]:
    """Return by node the victims that kube-scheduler has chosen: UIDs (`nodeCacheCapable`), or whole Pods."""
    rows: Any = (full if meta is None else meta) or {}
    try:
        return {name: _chosen(_folded(row)) for name, row in rows.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadRequest(400, "NodeNameToMetaVictims or NodeNameToVictims must map nodes to victims") from error


def _chosen(row: Mapping[str, Any]) -> Victims:
    pods = [_folded(pod) for pod in row["pods"] or ()]
    uids = (pod["metadata"]["uid"] if "metadata" in pod else pod["uid"] for pod in pods)
    return Victims(tuple(map(str, uids)), int(row.get("numpdbviolations") or 0))


def _folded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with keys in lower case, as Go's decoder compares them."""
    return {key.lower(): value for key, value in row.items()}


def _arguments(body: Body) -> dict[str, Any]:
    try:
        top = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(400, f"the body is not JSON: {error}") from error
    if not isinstance(top, dict):
        raise BadRequest(400, "the body must be an object")
    return _folded(top)


def _text(arguments: Mapping[str, Any], key: str) -> str:
    value = arguments.get(key.lower())
    if not isinstance(value, str) or (not value and key != "PodUID"):
        raise BadRequest(400, f"{key} must be a string")
    return value


def _nodes(raw: object) -> dict[str, Any]:
    items: Sequence[Any] | None = raw.get("items", raw.get("Items")) if isinstance(raw, dict) else None
    if items is None:
        raise BadRequest(400, "NodeNames or Nodes must be given")
    try:
        return {str(item["metadata"]["name"]): item for item in items}
    except (TypeError, KeyError) as error:
        raise BadRequest(400, "Nodes must be a NodeList whose items have names") from error
