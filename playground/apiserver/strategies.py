"""Defines the defaults and the validation that only one kind of object has.

To define them for another kind, add a row to `_STRATEGIES`. `objects` gets the strategy of each kind here. When
`defaults` and `prepare` get an object, it has been decoded but not validated, so required fields may be missing.
"""

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from playground.apiserver import claim_rules, claim_status_rules, pod_claim_rules, pod_rules, slice_rules
from playground.apiserver.admission_webhooks import condition_problems
from playground.apiserver.api_errors import Cause, invalid_value, required
from playground.apiserver.storage import Object


@dataclass(frozen=True)
class Strategy:
    """The functions that the API server calls for objects of one kind.

    Attributes:
        defaults: Sets the defaults of an object in place. It is called whenever an object is decoded.
        prepare: Sets the fields that the server determines for a new object, in place.
        validate: Returns the problems of an object that is created or updated.
        validate_update: Returns the problems of an update, given the new and the old object.
        kept_status: The names of status fields that keep their old values if a new status does not contain them.
        resets_metadata: Whether an update of the status leaves the metadata as they are.
        prepare_status: Changes an object whose status is updated in place, given also the old object.
        validate_status: Returns the problems of an update of the status, given the new and the old object.
    """

    defaults: Callable[[Object], None] = lambda _: None
    prepare: Callable[[Object], None] = lambda _: None
    validate: Callable[[Object], Iterable[Cause]] = lambda _: ()
    validate_update: Callable[[Object, Object], Iterable[Cause]] = lambda _new, _old: ()
    kept_status: tuple[str, ...] = ()
    resets_metadata: bool = False
    prepare_status: Callable[[Object, Object], None] = lambda _new, _old: None
    validate_status: Callable[[Object, Object], Iterable[Cause]] = lambda _new, _old: ()


def _prepare_pod(pod: Object) -> None:
    pod["status"] = pod_rules.initial_status(pod)


def _namespace_defaults(namespace: Object) -> None:
    labels = namespace["metadata"].setdefault("labels", {})
    labels["kubernetes.io/metadata.name"] = namespace["metadata"].get("name", "")


def _prepare_namespace(namespace: Object) -> None:
    namespace["spec"] = {"finalizers": ["kubernetes"]}
    namespace["status"] = {"phase": "Active"}


def _node_defaults(node: Object) -> None:
    node.setdefault("spec", {})
    status = node.setdefault("status", {})
    if status.get("capacity") and not status.get("allocatable"):
        status["allocatable"] = dict(status["capacity"])
    for condition in status.get("conditions") or []:
        condition.setdefault("lastHeartbeatTime", None)
        condition.setdefault("lastTransitionTime", None)


def _webhook_defaults(config: Object) -> None:
    for hook in config.get("webhooks") or []:
        hook.setdefault("failurePolicy", "Fail")
        hook.setdefault("matchPolicy", "Equivalent")
        hook.setdefault("namespaceSelector", {})
        hook.setdefault("objectSelector", {})
        hook.setdefault("timeoutSeconds", 10)
        if config["kind"].startswith("Mutating"):
            hook.setdefault("reinvocationPolicy", "Never")
        for rule in hook.get("rules") or []:
            rule.setdefault("scope", "*")
        if service := (hook.get("clientConfig") or {}).get("service"):
            service.setdefault("port", 443)


def _check_webhooks(config: Object) -> Iterable[Cause]:
    for i, hook in enumerate(config.get("webhooks") or []):
        path, name = f"webhooks[{i}]", hook.get("name") or ""
        if len(name.split(".")) < 3:
            detail = "should be a domain with at least three segments separated by dots"
            yield invalid_value(f"{path}.name", name, detail)
        if hook.get("sideEffects") not in ("None", "NoneOnDryRun"):
            yield required(f"{path}.sideEffects", "must specify one of None, NoneOnDryRun")
        yield from condition_problems(hook, path)
        client = hook.get("clientConfig") or {}
        if bool(client.get("url")) == bool(client.get("service")):
            yield required(f"{path}.clientConfig", "exactly one of url or service is required")
        if not hook.get("admissionReviewVersions"):
            yield required(f"{path}.admissionReviewVersions", "must specify one of v1, v1beta1")
        if not 1 <= hook["timeoutSeconds"] <= 30:
            detail = "the timeout value must be between 1 and 30 seconds"
            yield invalid_value(f"{path}.timeoutSeconds", hook["timeoutSeconds"], detail)


def _service_defaults(service: Object) -> None:
    spec = service.setdefault("spec", {})
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    for port in spec.get("ports") or []:
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port.get("port"))


def _secret_defaults(secret: Object) -> None:
    secret.setdefault("type", "Opaque")
    for key, text in (secret.pop("stringData", None) or {}).items():
        secret.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()


def _event_defaults(event: Object) -> None:
    for field, value in (("eventTime", None), ("reportingComponent", ""), ("reportingInstance", "")):
        event.setdefault(field, value)


def _check_event(event: Object) -> Iterable[Cause]:
    about = (event.get("involvedObject") or {}).get("namespace") or "default"
    if about != event["metadata"].get("namespace"):
        yield invalid_value("involvedObject.namespace", about, "does not match event.namespace")


_CRD_CONDITIONS = (
    ("NamesAccepted", "NoConflicts", "no conflicts found"),
    ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
)


def _crd_defaults(crd: Object) -> None:
    spec = crd.setdefault("spec", {})
    names = spec.setdefault("names", {})
    if names.get("kind"):
        names.setdefault("singular", names["kind"].lower())
        names.setdefault("listKind", f"{names['kind']}List")
    spec.setdefault("conversion", {"strategy": "None"})


def _prepare_crd(crd: Object) -> None:
    established = [{"type": t, "status": "True", "reason": r, "message": m} for t, r, m in _CRD_CONDITIONS]
    stored = [v["name"] for v in crd["spec"].get("versions") or [] if v.get("storage")]
    crd["status"] = {"conditions": established, "acceptedNames": crd["spec"]["names"], "storedVersions": stored}


def _check_crd(crd: Object) -> Iterable[Cause]:
    spec, name = crd["spec"], crd["metadata"].get("name")
    if name != f"{spec.get('names', {}).get('plural')}.{spec.get('group')}":
        yield invalid_value("metadata.name", name, 'must be spec.names.plural+"."+spec.group')
    if sum(1 for v in spec.get("versions") or [] if v.get("storage")) != 1:
        yield Cause("spec.versions", "Invalid value: must have exactly one version marked as storage version")
    if spec.get("scope") not in ("Cluster", "Namespaced"):
        yield required("spec.scope")


_CLAIMS = Strategy(
    claim_rules.defaults,
    claim_rules.prepare,
    validate=claim_rules.validate,
    validate_update=claim_rules.validate_update,
    resets_metadata=True,
    prepare_status=claim_status_rules.drop_deallocated,
    validate_status=claim_status_rules.validate,
)
_TEMPLATES = Strategy(
    claim_rules.template_defaults,
    validate=claim_rules.validate_template,
    validate_update=claim_rules.validate_template_update,
)
_WEBHOOKS = Strategy(_webhook_defaults, validate=_check_webhooks)
_STRATEGIES = {
    "pods": Strategy(
        pod_rules.defaults,
        _prepare_pod,
        pod_rules.validate,
        pod_rules.validate_update,
        ("qosClass",),
        validate_status=pod_claim_rules.validate_status,
    ),
    "nodes": Strategy(_node_defaults),
    "namespaces": Strategy(_namespace_defaults, _prepare_namespace),
    "services": Strategy(_service_defaults),
    "secrets": Strategy(_secret_defaults),
    "events": Strategy(_event_defaults, validate=_check_event),
    "mutatingwebhookconfigurations.admissionregistration.k8s.io": _WEBHOOKS,
    "validatingwebhookconfigurations.admissionregistration.k8s.io": _WEBHOOKS,
    "deviceclasses.resource.k8s.io": Strategy(claim_rules.class_defaults, validate=claim_rules.validate_class),
    "resourceclaims.resource.k8s.io": _CLAIMS,
    "resourceclaimtemplates.resource.k8s.io": _TEMPLATES,
    "resourceslices.resource.k8s.io": Strategy(
        slice_rules.defaults, validate=slice_rules.validate, validate_update=slice_rules.validate_update
    ),
    "customresourcedefinitions.apiextensions.k8s.io": Strategy(_crd_defaults, _prepare_crd, _check_crd),
}
_PLAIN = Strategy()


def strategy(resource: str) -> Strategy:
    """Return the strategy of a resource such as `pods`. For a resource without a row, the strategy does nothing."""
    return _STRATEGIES.get(resource, _PLAIN)
