"""What the API server does to pods: defaults, and the rules for creating and changing one."""

from typing import Any

from mgpu.model.quantities import parse_quantity
from playground.apiserver.errors import Cause, forbidden_field, invalid_value, required, unsupported
from playground.apiserver.names import dns_label, qualified_name
from playground.apiserver.storage import Object

_STANDARD = frozenset(("cpu", "memory", "ephemeral-storage", "storage"))
_RESTART = ("Always", "OnFailure", "Never")
_UPDATE_RULE = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)\n"
)
_NODE_LIFE = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def _default_container(container: Object) -> None:
    image = container.get("image") or ""
    tag = image.rpartition("/")[2].partition(":")[2]
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    container.setdefault("imagePullPolicy", "Always" if tag in ("", "latest") and "@" not in image else "IfNotPresent")
    resources = container.setdefault("resources", {})
    if limits := resources.get("limits"):
        resources["requests"] = {**limits, **(resources.get("requests") or {})}
    for port in container.get("ports") or []:
        port.setdefault("protocol", "TCP")
    for env in container.get("env") or []:
        if field := (env.get("valueFrom") or {}).get("fieldRef"):
            field.setdefault("apiVersion", "v1")
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        if found := container.get(probe):
            for key, value in (("timeoutSeconds", 1), ("periodSeconds", 10), ("successThreshold", 1)):
                found.setdefault(key, value)
            found.setdefault("failureThreshold", 3)
            if http := found.get("httpGet"):
                http.setdefault("path", "/")
                http.setdefault("scheme", "HTTP")


def containers(spec: Object) -> list[tuple[str, Object]]:
    """(field path, container) of every container of a pod."""
    lists = ("initContainers", "containers")
    return [(f"spec.{name}[{i}]", c) for name in lists for i, c in enumerate(spec.get(name) or [])]


def defaults(pod: Object) -> None:
    """Fill in what the decoder of the API server fills in. `pod` is changed."""
    spec = pod.setdefault("spec", {})
    for _, container in containers(spec):
        _default_container(container)
    for volume in spec.get("volumes") or []:
        for source in ("secret", "configMap", "projected", "downwardAPI"):
            if volume.get(source) is not None:
                volume[source].setdefault("defaultMode", 420)
        if "hostPath" in volume:
            volume["hostPath"].setdefault("type", "")
        if set(volume) == {"name"}:
            volume["emptyDir"] = {}
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    if name := spec.get("serviceAccountName") or spec.get("serviceAccount"):
        spec["serviceAccountName"] = spec["serviceAccount"] = name
    spec.setdefault("securityContext", {})
    spec.setdefault("schedulerName", "default-scheduler")
    spec.setdefault("enableServiceLinks", True)
    default_tolerations(spec)
    _default_status(pod.get("status") or {})


def _default_status(status: Object) -> None:
    if status.get("podIP"):
        status.setdefault("podIPs", [{"ip": status["podIP"]}])
    for condition in status.get("conditions") or []:
        condition.setdefault("lastProbeTime", None)
        condition.setdefault("lastTransitionTime", None)


def default_tolerations(spec: Object) -> None:
    """The DefaultTolerationSeconds admission plugin: five minutes on a node that is gone."""
    tolerations = spec["tolerations"] = list(spec.get("tolerations") or [])
    for key in _NODE_LIFE:
        if any(t.get("key") in (key, None, "") and t.get("effect") in ("NoExecute", None, "") for t in tolerations):
            continue
        tolerations.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})


def qos_class(spec: Object) -> str:
    """Guaranteed, Burstable or BestEffort, from cpu and memory alone."""
    guaranteed, any_amount = True, False
    for _, container in containers(spec):
        resources = container.get("resources") or {}
        requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
        for name in ("cpu", "memory"):
            any_amount |= name in requests or name in limits
            guaranteed &= name in limits and requests.get(name) == limits[name]
    return "BestEffort" if not any_amount else "Guaranteed" if guaranteed else "Burstable"


def initial_status(pod: Object) -> Object:
    status: Object = {"phase": "Pending", "qosClass": qos_class(pod["spec"])}
    if pod["spec"].get("schedulingGates"):
        condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "lastProbeTime": None}
        condition |= {"message": "Scheduling is blocked due to non-empty scheduling gates", "lastTransitionTime": None}
        status["conditions"] = [condition]
    return status


def _extended(name: str) -> bool:
    return "/" in name and not name.rpartition("/")[0].endswith("kubernetes.io") and not name.startswith("requests.")


def _check_resources(path: str, resources: Object) -> list[Cause]:
    problems: list[Cause] = []
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    for part, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            problems += _check_amount(f"{path}.{part}", name, amount)
    for name, amount in requests.items():
        if name in limits:
            problems += _check_pair(path, name, amount, limits[name])
        elif _extended(name):
            problems.append(required(f"{path}.limits", "Limit must be set for non overcommitable resources"))
    return problems


def _check_amount(path: str, name: str, amount: Any) -> list[Cause]:
    field = f"{path}[{name}]"
    if bad := qualified_name(name, field):
        return bad
    problems: list[Cause] = []
    if "/" not in name and name not in _STANDARD and not name.startswith("hugepages-"):
        problems.append(invalid_value(field, name, "must be a standard resource type or fully qualified"))
        problems.append(invalid_value(field, name, "must be a standard resource for containers"))
    value = parse_quantity(amount)
    if value < 0:
        problems.append(invalid_value(field, amount, "must be greater than or equal to 0"))
    if _extended(name) and value.denominator != 1:
        problems.append(invalid_value(field, amount, "must be an integer"))
    return problems


def _check_pair(path: str, name: str, request: Any, limit: Any) -> list[Cause]:
    if _extended(name) and parse_quantity(request) != parse_quantity(limit):
        return [invalid_value(f"{path}.requests", request, f"must be equal to {name} limit of {limit}")]
    if parse_quantity(request) > parse_quantity(limit):
        detail = f"must be less than or equal to {name} limit of {limit}"
        return [invalid_value(f"{path}.requests", request, detail)]
    return []


def validate(pod: Object) -> list[Cause]:
    """Problems of a new pod."""
    spec, problems, seen = pod["spec"], [], set()
    if not spec.get("containers"):
        problems.append(required("spec.containers"))
    for path, container in containers(spec):
        name = container.get("name") or ""
        problems += dns_label(name, f"{path}.name") if name else [required(f"{path}.name")]
        if name in seen:
            problems.append(Cause(f"{path}.name", f'Duplicate value: "{name}"', "FieldValueDuplicate"))
        seen.add(name)
        if not container.get("image"):
            problems.append(required(f"{path}.image"))
        problems += _check_resources(f"{path}.resources", container.get("resources") or {})
    if spec["restartPolicy"] not in _RESTART:
        problems.append(unsupported("spec.restartPolicy", spec["restartPolicy"], _RESTART))
    return problems


def _comparable(spec: Object, *, old_grace: int | None, gated: bool) -> Object:
    """The part of a spec that an update may not change."""
    fixed = {k: v for k, v in spec.items() if k not in ("activeDeadlineSeconds", "tolerations", "schedulingGates")}
    for name in ("containers", "initContainers"):
        if name in fixed:
            fixed[name] = [{k: v for k, v in c.items() if k != "image"} for c in fixed[name] or []]
    if gated:
        fixed.pop("nodeSelector", None)
        fixed.pop("affinity", None)
    if old_grace is not None and old_grace < 0:
        fixed.pop("terminationGracePeriodSeconds", None)
    return {k: v for k, v in fixed.items() if v not in (None, [], {})}


def validate_update(new: Object, old: Object) -> list[Cause]:
    """Problems of changing `old` into `new` through the pod itself."""
    now, was = new["spec"], old["spec"]
    if len(now.get("containers") or []) != len(was["containers"]):
        return [forbidden_field("spec.containers", "pod updates may not add or remove containers")]
    problems = []
    rest = was.get("tolerations") or []
    if any(t not in (now.get("tolerations") or []) for t in rest):
        problems.append(
            forbidden_field("spec.tolerations", "existing toleration can not be modified except its tolerationSeconds")
        )
    gates = [g["name"] for g in was.get("schedulingGates") or []]
    if any(g["name"] not in gates for g in now.get("schedulingGates") or []):
        problems.append(
            forbidden_field("spec.schedulingGates", "only deletion is allowed, but found new scheduling gate")
        )
    flags: dict[str, Any] = {"old_grace": was.get("terminationGracePeriodSeconds"), "gated": bool(gates)}
    if _comparable(now, **flags) != _comparable(was, **flags):
        problems.append(forbidden_field("spec", _UPDATE_RULE))
    return problems


def grace_period(pod: Object, wanted: int | None) -> int:
    """Seconds that a deletion leaves the kubelet; 0 removes the pod at once."""
    if not pod["spec"].get("nodeName") or pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
        return 0
    seconds = pod["spec"].get("terminationGracePeriodSeconds", 30) if wanted is None else wanted
    return 1 if seconds < 0 else int(seconds)
