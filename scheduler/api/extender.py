"""Serves kube-scheduler's extender protocol: `/filter`, `/prioritize`, `/preempt` and `/bind`.

The module translates between JSON and `scheduler.decisions`, and decides nothing itself. `api.app` serves it, and
`gpushare_compat` serves three of the verbs under gpushare's paths, too. The protocol is defined in
k8s.io/kube-scheduler/extender/v1 (docs/design/kubernetes.md, "kube-scheduler's extender"). Its Go types have no JSON
tags, so requests may spell keys in any case, and replies must have capitalized keys.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

import orjson
from flask import Flask

from mgpu.kube import ApiError, Unreachable
from mgpu.model.errors import BadObject, RetryLater
from mgpu.model.gpu_requests import Rejection, RejectionKind
from mgpu.model.pods import read_pod
from mgpu.model.raw_objects import table_at
from mgpu.model.resource_claims import Claim
from mgpu.serving.app import new_app, serve_posts
from mgpu.serving.deadlines import watch_client
from mgpu.serving.posts import View, read_body
from mgpu.serving.request_memory import EXTENDER
from mgpu.serving.review import BadRequest, Reply
from scheduler import metrics
from scheduler.api.replica import Replica
from scheduler.cluster.gpu_pods import GpuPod
from scheduler.cluster.reservations import Reservation
from scheduler.decisions.decider import pod_path
from scheduler.decisions.effort_budgets import CallerGone, EffortExceeded, never
from scheduler.decisions.filter import Filtered
from scheduler.decisions.instance_filter import InstanceFilter
from scheduler.decisions.preemption import Victims
from scheduler.decisions.shortlist import Shortlists
from scheduler.decisions.suggestions import WaitingPod
from scheduler.engine.partitioning.partitionable_node import requested_slices

_NODES_COUNTED = 500
"""The most nodes whose reasons are counted. That suffices to find a frequent reason."""

_SAMPLE = 100
"""The least number of nodes of a sample (schedule_one.go, minFeasibleNodesToFind)."""
_REASONS = 100
"""The most nodes whose reasons are sent if other nodes pass. kube-scheduler uses the reasons only if no node passes,
and decoding those of thousands of nodes takes milliseconds."""

Body = bytes | bytearray


class Extender:
    """Implements the four verbs. Each takes the body of a request, and returns an object that is sent as JSON.

    Each verb raises BadRequest for a malformed body, and RetryLater if this replica cannot answer now. For GPU pods,
    `filter`, `prioritize` and `preempt` also raise RetryLater while this replica does not decide. The argument `gone`
    is a function that returns whether kube-scheduler has given up waiting.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._decider = replica.decider
        self._shortlists = Shortlists(replica.filter, replica.settings.scheduler.filtered_nodes)
        self._instances = InstanceFilter(replica.state, replica.claim_decider)

    def filter(self, body: Body, gone: CallerGone = never) -> dict[str, Any]:
        """Answer an ExtenderArgs with an ExtenderFilterResult."""
        began = time.monotonic()
        gpu_pod, raw, names, nodes = self._scheduling(body)
        if gpu_pod:
            result = self._replica.in_flight.filter(gpu_pod, names, gone)
            self._reject_for_instances(raw, result)
            self._follow_up(gpu_pod, result, began)
            if not result.passed and _SAMPLE <= len(names) < self._replica.state.node_count():
                self._look_elsewhere(gpu_pod, raw)
            passed = self._shortlists.choose(gpu_pod, raw, result, gone)
            if len(passed) == 1:
                self._replica.in_flight.expect(gpu_pod, passed)  # kube-scheduler does not call `prioritize` then.
        else:
            result = self._replica.filter.filter_without_request(read_pod(raw), names)
            self._reject_for_instances(raw, result)
            passed = result.passed
        failed, hopeless = result.failed, result.hopeless
        if passed and len(failed) + len(hopeless) > _REASONS:
            failed = hopeless = {}
        answer: dict[str, Any] = {"FailedNodes": failed, "FailedAndUnresolvableNodes": hopeless, "Error": ""}
        if nodes is None:
            return {"NodeNames": passed, **answer}
        return {"Nodes": {"items": [nodes[name] for name in passed]}, **answer}

    def _reject_for_instances(self, raw: Mapping[str, Any], result: Filtered) -> None:
        """Reject the nodes that have no MIG instances for a claim of the pod, of those that have passed."""
        claims = self._instance_claims(raw)
        rejected = self._instances.rejections(claims, result.passed) if claims else {}
        for name, rejection in rejected.items():
            result.reject((name,), rejection)
        if rejected:
            result.leave_out(rejected.keys())

    def _instance_claims(self, raw: Mapping[str, Any]) -> tuple[Claim, ...]:
        claims = self._instances.claims_of(raw)
        if claims:
            self._replica.may_decide()  # See `_pod`.
        return claims

    def _follow_up(self, gpu_pod: GpuPod, result: Filtered, began: float) -> None:
        """Report the result to the parts of the scheduler that can help the pod. The method returns at once."""
        if gpu_pod.request and requested_slices(gpu_pod.request):
            self._replica.planning.request_plan(gpu_pod, result.repartitionable, result.passed)
        if not result.passed:
            self._replica.announcements.pod_rejected(time.monotonic() - began)
            _count_rejection(result)

    def _look_elsewhere(self, gpu_pod: GpuPod, raw: Mapping[str, Any]) -> None:
        """Have a node suggested to kube-scheduler if the pod fits on one outside of the sample of this call."""
        pod = gpu_pod.pod
        if gpu_pod.request is None or pod.gated or self._replica.state.gangs.of(pod):
            return
        selector = {key: str(value) for key, value in table_at(raw, "spec", "nodeSelector").items()}
        nominated = str(table_at(raw, "status").get("nominatedNodeName") or "")
        self._replica.suggestions.refused_in_sample(WaitingPod(pod.uid, pod.namespace, nominated, "", selector))

    def prioritize(self, body: Body, gone: CallerGone = never) -> list[dict[str, Any]]:
        """Answer an ExtenderArgs with a HostPriorityList: 0 to 10 points for each node."""
        gpu_pod, raw, names, _ = self._scheduling(body)
        if gpu_pod:
            scores = self._shortlists.scores(gpu_pod, names, gone)
            self._replica.in_flight.expect(gpu_pod, names, scores)
        else:
            claims = self._instance_claims(raw)
            scores = self._instances.scores(claims, names) if claims else [0] * len(names)
        return [{"Host": name, "Score": score} for name, score in zip(names, scores, strict=True)]

    def preempt(self, body: Body, gone: CallerGone = never) -> dict[str, Any]:
        """Answer an ExtenderPreemptionArgs: choose victims on the nodes on which kube-scheduler has chosen victims."""
        arguments = _arguments(body)
        proposed = _victims(arguments.get("nodenametometavictims"), arguments.get("nodenametovictims"))
        gpu_pod = self._pod(arguments.get("pod"))
        chosen: Mapping[str, Victims] = proposed
        if gpu_pod:
            beside = self._replica.gang_filter.beside(gpu_pod)
            chosen = self._replica.preemption.choose(gpu_pod, arguments["pod"], proposed, gone, beside)
        rows = {
            name: {"Pods": [{"UID": uid} for uid in victims.uids], "NumPDBViolations": victims.violations}
            for name, victims in chosen.items()
        }
        return {"NodeNameToMetaVictims": rows}

    def bind(self, body: Body, gone: CallerGone = never) -> dict[str, str]:
        """Answer an ExtenderBindingArgs: decide the cards and post the Binding with the allocation record.

        A replica that does not decide posts the Binding without a record. The admission of Bindings decides then, at
        the replica that the Service selects.
        """
        arguments = _arguments(body)
        namespace, name, uid, node = (_text(arguments, key) for key in ("PodNamespace", "PodName", "PodUID", "Node"))
        self._replica.may_answer()
        pod = self._decider.find(namespace, name, uid)
        if pod is None:
            return {"Error": f"there is no pod {namespace}/{name} with uid {uid}"}
        decision = self._decide(pod.gpu_pod, node, gone) if pod.gpu_pod else None
        if isinstance(decision, Rejection):
            return {"Error": f"no cards for this pod on {node}: {decision}"}
        return {"Error": self._post(namespace, name, pod.uid, node, decision) or ""}

    def _decide(self, gpu_pod: GpuPod, node: str, gone: CallerGone) -> Reservation | Rejection | None:
        """Return the decision, or None if this replica does not decide."""
        try:
            self._replica.may_decide()
        except RetryLater:
            return None
        try:
            refused = self._replica.gang_filter.refusal(gpu_pod, node)
            decision = refused or self._decider.decide(gpu_pod, node, gone=gone)
        except EffortExceeded as error:
            return Rejection(RejectionKind.NOT_PROVEN, str(error), proven=False)
        try:
            # This is checked again, because the process may have been suspended and another replica may lead by now.
            self._replica.may_decide()
        except RetryLater:
            return None
        return decision

    def _post(self, namespace: str, name: str, uid: str, node: str, decision: Reservation | None) -> str | None:
        """Post the Binding. Return the error, or None."""
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
            self._replica.api.create(f"{pod_path(namespace, name)}/binding", binding)
        except ApiError as error:
            if decision:
                self._decider.check(decision)
            return str(error)
        except Unreachable as error:
            return f"it is unknown whether the pod is bound: {error}"
        return None

    def _scheduling(self, body: Body) -> tuple[GpuPod | None, Mapping[str, Any], list[str], Mapping[str, Any] | None]:
        """Return the parts of an ExtenderArgs.

        These are the GPU pod, or None if the pod requests no GPU; the pod as an object; the names of the nodes; and the
        Nodes by name, or None if the call has only names (`nodeCacheCapable`).
        """
        arguments = _arguments(body)
        names = arguments.get("nodenames")
        nodes = None
        if names is None:
            nodes = _nodes(arguments.get("nodes"))
            names = list(nodes)
        if not isinstance(names, list) or set(map(type, names)) - {str}:
            raise BadRequest(400, "NodeNames must be a list of strings")
        raw: Any = arguments.get("pod")
        return self._pod(raw), raw, names, nodes

    def _pod(self, raw: object) -> GpuPod | None:
        """Return the pod of a call, or None if it requests no GPU."""
        if not isinstance(raw, dict):
            raise BadRequest(400, "Pod must be an object")
        self._replica.may_answer()
        try:
            gpu_pod = self._decider.read(raw) or self._replica.open_claims.read(raw)
        except BadObject as error:
            raise BadRequest(400, f"Pod is not a valid Pod: {error}") from error
        if gpu_pod:
            # Only the replica that decides has the reservations. Without them, several pods pass for one free card, and
            # their Bindings are then accepted without mgpu's answer. kube-scheduler tries again after a 503.
            self._replica.may_decide()
        return gpu_pod


def make_app(extender: Extender, seconds: float = 10.0) -> Flask:
    """Return the app of the extender.

    Args:
        seconds: The time for which kube-scheduler waits for an answer (`httpTimeout`).
    """
    app = new_app(EXTENDER)
    for verb in (extender.filter, extender.prioritize, extender.preempt, extender.bind):
        serve_posts(app, f"/{verb.__name__}", posted(verb, seconds))
    return app


def posted(verb: Any, seconds: float) -> View:
    """Return the view of one verb. The view also measures the time that the verb takes."""
    duration = metrics.EXTENDER.labels(verb.__name__)

    def answer() -> Reply:
        with duration.time(), read_body() as data:
            return Reply(verb(data, watch_client(seconds)))

    return answer


def _count_rejection(result: Filtered) -> None:
    """Count a pod that fits on no node in the metric of rejections, by the kind of the most frequent reason.

    If there are more than `_NODES_COUNTED` nodes, those on which evictions may help are counted first.
    """
    reasons = Counter(islice(chain(result.failed.values(), result.hopeless.values()), _NODES_COUNTED))
    for reason, _ in reasons.most_common(1):
        metrics.REJECTIONS.labels("filter", result.kinds[reason]).inc()


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
    """Return the row with keys in lower case, because Go's JSON decoder ignores the case of keys."""
    return {key.lower(): value for key, value in row.items()}


def decode_object(body: Body) -> dict[str, Any]:
    """Return the JSON object in the body of a request. Raises BadRequest if it is none."""
    try:
        top = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(400, f"the body is not JSON: {error}") from error
    if not isinstance(top, dict):
        raise BadRequest(400, "the body must be an object")
    return top


def _arguments(body: Body) -> dict[str, Any]:
    return _folded(decode_object(body))


def _text(arguments: Mapping[str, Any], key: str) -> str:
    value = arguments.get(key.lower())
    if not isinstance(value, str):
        raise BadRequest(400, f"{key} must be a string")
    if not value and key != "PodUID":
        raise BadRequest(400, f"{key} must not be empty")
    return value


def _nodes(raw: object) -> dict[str, Any]:
    items: Sequence[Any] | None = raw.get("items", raw.get("Items")) if isinstance(raw, dict) else None
    if items is None:
        raise BadRequest(400, "NodeNames or Nodes must be given")
    try:
        return {str(item["metadata"]["name"]): item for item in items}
    except (TypeError, KeyError) as error:
        raise BadRequest(400, "Nodes must be a NodeList whose items have names") from error
