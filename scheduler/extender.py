"""kube-scheduler's extender protocol (k8s.io/kube-scheduler/extender/v1): `/filter`, `/prioritize`, `/bind`.

Go types without JSON tags: requests may spell keys in any case, replies are capitalised.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson
from flask import Flask, Response, request

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.asks import Rejection
from mgpu.model.errors import BadObject, RetryLater
from mgpu.serving.app import new_app
from mgpu.serving.review import BadRequest
from mgpu.settings import Settings
from scheduler.deciding import Decider, pod_path
from scheduler.decisions import Decision
from scheduler.filtering import Filter, Filtered
from scheduler.gpu_pods import GpuPod, read_gpu_pod

# The form with whole Nodes: 5,000 of them are some 50 MB.
_MAX_BODY = 256 << 20


class Gate(Protocol):
    """What this process may do now."""

    def ready(self) -> str:
        """Why it should not be asked yet; "": it should."""

    def may_answer(self) -> None:
        """From the cache. Raises RetryLater with the reason why not."""

    def may_decide(self) -> None:
        """And write. Raises RetryLater with the reason why not."""


class Extender:
    """The three verbs, from decoded JSON to what is to be JSON. Each raises BadRequest and RetryLater."""

    def __init__(self, filter_: Filter, decider: Decider, api: Api, settings: Settings, gate: Gate) -> None:
        self._filter, self._decider, self._api, self._settings = filter_, decider, api, settings
        self._gate = gate

    def filter(self, body: bytes) -> dict[str, Any]:
        known, names, nodes = self._scheduling(body)
        found = self._filter.filter(known, names) if known else Filtered(passed=names)
        answer: dict[str, Any] = {
            "FailedNodes": found.failed,
            "FailedAndUnresolvableNodes": found.hopeless,
            "Error": "",
        }
        if nodes is None:
            return {"NodeNames": found.passed, **answer}
        return {"Nodes": {"items": [nodes[name] for name in found.passed]}, **answer}

    def prioritize(self, body: bytes) -> list[dict[str, Any]]:
        known, names, _ = self._scheduling(body)
        scores = self._filter.scores(known, names) if known else [0] * len(names)
        return [{"Host": name, "Score": score} for name, score in zip(names, scores, strict=True)]

    def bind(self, body: bytes) -> dict[str, str]:
        """Posts the Binding with the decision in it. A replica that may not decide leaves that to the admission."""
        arguments = _arguments(body)
        namespace, name, uid, node = (_text(arguments, key) for key in ("PodNamespace", "PodName", "PodUID", "Node"))
        self._gate.may_answer()
        found, known = self._decider.find(namespace, name, uid)
        if not found:
            return {"Error": f"there is no pod {namespace}/{name} with uid {uid}"}
        decision = self._decide(known, node) if known else None
        if isinstance(decision, str):
            return {"Error": f"no cards for this pod on {node}: {decision}"}
        return {"Error": self._post(namespace, name, found, node, decision)}

    def _decide(self, known: GpuPod, node: str) -> Decision | str | None:
        try:
            self._gate.may_decide()
        except RetryLater:
            return None
        found = self._decider.decide(known, node)
        return str(found) if isinstance(found, Rejection) else found

    def _post(self, namespace: str, name: str, uid: str, node: str, decision: Decision | None) -> str:
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

    def _scheduling(self, body: bytes) -> tuple[GpuPod | None, list[str], Mapping[str, Any] | None]:
        """The pod (None: it asks for no GPU), the names of the nodes, and the Nodes where the call has those."""
        arguments = _arguments(body)
        pod, names = arguments.get("pod"), arguments.get("nodenames")
        if not isinstance(pod, dict):
            raise BadRequest(400, "Pod must be an object")
        nodes = None
        if names is None:
            nodes = _nodes(arguments.get("nodes"))
            names = list(nodes)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise BadRequest(400, "NodeNames must be a list of strings")
        self._gate.may_answer()
        try:
            return read_gpu_pod(pod, self._settings), names, nodes
        except BadObject as error:
            raise BadRequest(400, f"Pod is no pod: {error}") from error


def make_app(extender: Extender) -> Flask:
    app = new_app()
    app.config["MAX_CONTENT_LENGTH"] = _MAX_BODY
    for verb in (extender.filter, extender.prioritize, extender.bind):
        app.add_url_rule(f"/{verb.__name__}", verb.__name__, _posted(verb), methods=["POST"])
    return app


def _posted(verb: Any) -> Any:
    def answer() -> Response:
        return Response(orjson.dumps(verb(request.get_data(cache=False))), mimetype="application/json")

    return answer


def _arguments(body: bytes) -> dict[str, Any]:
    try:
        top = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(400, f"the body is not JSON: {error}") from error
    if not isinstance(top, dict):
        raise BadRequest(400, "the body must be an object")
    return {key.lower(): value for key, value in top.items()}


def _text(arguments: Mapping[str, Any], key: str) -> str:
    value = arguments.get(key.lower())
    if not isinstance(value, str) or (not value and key != "PodUID"):
        raise BadRequest(400, f"{key} must be a string")
    return value


def _nodes(raw: object) -> dict[str, Any]:
    items: Sequence[Any] | None = raw.get("items", raw.get("Items")) if isinstance(raw, dict) else None
    try:
        return {str(item["metadata"]["name"]): item for item in items or ()} if items is not None else _missing()
    except (TypeError, KeyError) as error:
        raise BadRequest(400, "Nodes must be a NodeList whose items have names") from error


def _missing() -> dict[str, Any]:
    raise BadRequest(400, "NodeNames or Nodes must be given")
