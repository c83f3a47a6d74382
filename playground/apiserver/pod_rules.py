"""The API server's rules for pods: defaults, validation, grace periods, and admission plugins such as Priority.

`strategies` registers the defaults, the validation and the initial status. `writes` calls the plugins Priority and
ResourceQuota when a pod is created, and `deletions` calls `grace_period`.
"""

from fractions import Fraction
from typing import Any

from mgpu.model.quantities import parse_quantity
from playground.apiserver.api_errors import Cause, forbidden, forbidden_field, invalid_value, required, unsupported
from playground.apiserver.names import dns_label, qualified_name
from playground.apiserver.object_decoding import canonical
from playground.apiserver.pod_claim_rules import validate_claims
from playground.apiserver.storage import Object, Storage

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
    for part in ("limits", "requests", "claims"):
        if part in resources and not resources[part]:
            del resources[part]
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
    """Return the field path and the container for each container of a pod. The init containers come first."""
    lists = ("initContainers", "containers")
    return [(f"spec.{name}[{i}]", c) for name in lists for i, c in enumerate(spec.get(name) or [])]


def defaults(pod: Object) -> None:
    """Set the defaults of a pod in place, including the tolerations of the plugin DefaultTolerationSeconds."""
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
    """Let the pod stay for five minutes on a node that has become not ready or unreachable.

    kube-apiserver does this in its admission plugin DefaultTolerationSeconds.
    """
    tolerations = spec["tolerations"] = list(spec.get("tolerations") or [])
    for key in _NODE_LIFE:
        if any(t.get("key") in (key, None, "") and t.get("effect") in ("NoExecute", None, "") for t in tolerations):
            continue
        tolerations.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})


def qos_class(spec: Object) -> str:
    """Return the QoS class: Guaranteed, Burstable or BestEffort. Only cpu and memory determine it."""
    guaranteed = True
    any_amount = False
    for _, container in containers(spec):
        resources = container.get("resources") or {}
        requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
        for name in ("cpu", "memory"):
            any_amount |= name in requests or name in limits
            guaranteed &= name in limits and requests.get(name) == limits[name]
    if not any_amount:
        return "BestEffort"
    return "Guaranteed" if guaranteed else "Burstable"


def initial_status(pod: Object) -> Object:
    """Return the status of a new pod: Pending, with a condition if the pod has scheduling gates."""
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
    """Return the problems of a new or an updated pod."""
    problems: list[Cause] = []
    seen = set()
    spec = pod["spec"]
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
    return [*problems, *validate_claims(spec)]


def _comparable(spec: Object, *, old_grace: int | None, gated: bool) -> Object:
    """Return the part of a spec that an update may not change.

    Args:
        old_grace: The pod's terminationGracePeriodSeconds before the update. If it is negative, it may be changed.
        gated: Whether the pod has scheduling gates. The node selector and the affinity of such a pod may change.
    """
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
    """Return the problems of an update of a pod, given its new and its old state.

    Updates of a subresource, such as `pods/status`, have other rules.
    """
    now, was = new["spec"], old["spec"]
    if len(now.get("containers") or []) != len(was["containers"]):
        return [forbidden_field("spec.containers", "pod updates may not add or remove containers")]
    problems = []
    rest = was.get("tolerations") or []
    if any(t not in (now.get("tolerations") or []) for t in rest):
        detail = "existing toleration can not be modified except its tolerationSeconds"
        problems.append(forbidden_field("spec.tolerations", detail))
    gates = [g["name"] for g in was.get("schedulingGates") or []]
    if any(g["name"] not in gates for g in now.get("schedulingGates") or []):
        detail = "only deletion is allowed, but found new scheduling gate"
        problems.append(forbidden_field("spec.schedulingGates", detail))
    flags: dict[str, Any] = {"old_grace": was.get("terminationGracePeriodSeconds"), "gated": bool(gates)}
    if _comparable(now, **flags) != _comparable(was, **flags):
        problems.append(forbidden_field("spec", _UPDATE_RULE))
    return problems


def grace_period(pod: Object, wanted: int | None) -> int:
    """Return the seconds that a deletion leaves the kubelet to end the pod; 0 removes the pod at once.

    Args:
        wanted: The gracePeriodSeconds of the deletion request, or None if the request has none.
    """
    if not pod["spec"].get("nodeName") or pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
        return 0
    seconds = pod["spec"].get("terminationGracePeriodSeconds", 30) if wanted is None else wanted
    return 1 if seconds < 0 else int(seconds)


_CLASSES = "priorityclasses.scheduling.k8s.io"
_SYSTEM = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}


def resolve_priority(storage: Storage, pod: Object) -> None:
    """Set the priority and the preemption policy of a pod, as the Priority plugin does.

    A pod without a PriorityClass gets the default class if there is one. Raises a 403 for an unknown class, and for a
    pod whose own values differ from the values of its class.
    """
    spec = pod["spec"]
    pod_name = pod["metadata"].get("name") or pod["metadata"].get("generateName") or ""
    items = storage.collection(_CLASSES).items
    name = spec.get("priorityClassName") or ""
    if not name:
        defaults = [i.obj for key in sorted(items) if (i := items[key]).obj.get("globalDefault")]
        name = defaults[0]["metadata"]["name"] if defaults else ""
    item = items.get(("", name))
    if name and item is None and name not in _SYSTEM:
        raise forbidden("pods", pod_name, f"no PriorityClass with name {name} was found")
    found = item.obj if item else {}
    if name:
        spec["priorityClassName"] = name
    policy = found.get("preemptionPolicy") or "PreemptLowerPriority"
    for field, named, value in (
        ("priority", "the integer value of priority", found.get("value", _SYSTEM.get(name, 0))),
        ("preemptionPolicy", "the string value of PreemptionPolicy", policy),
    ):
        if spec.get(field) not in (None, value):
            computed = f"priority admission controller computed {value} from the given PriorityClass name"
            text = f"{named} ({spec[field]}) must not be provided in pod spec; {computed}"
            raise forbidden("pods", pod_name, text)
        spec[field] = value


_UNPREFIXED = ("cpu", "memory", "ephemeral-storage")


def _sum(containers: list[Object], part: str) -> dict[str, Fraction]:
    total: dict[str, Fraction] = {}
    for container in containers:
        for name, amount in ((container.get("resources") or {}).get(part) or {}).items():
            total[name] = total.get(name, Fraction(0)) + parse_quantity(amount)
    return total


def usage(pod: Object) -> dict[str, Fraction]:
    """Return the amounts of a pod that count towards a quota.

    The keys are the same as in a quota's `spec.hard`: `pods`, `cpu`, `requests.<name>`, `limits.<name>` and so on.
    """
    spec = pod["spec"]
    charged = {"pods": Fraction(1), "count/pods": Fraction(1)}
    for part in ("requests", "limits"):
        total = _sum(spec["containers"], part)
        for init in spec.get("initContainers") or []:
            for name, amount in _sum([init], part).items():
                total[name] = max(total.get(name, Fraction(0)), amount)
        for name, amount in total.items():
            charged[f"{part}.{name}"] = amount
            if part == "requests" and name in _UNPREFIXED:
                charged[name] = amount
    return charged


def check_quotas(storage: Storage, pod: Object) -> None:
    """Raise a 403 if a new pod exceeds a quota of its namespace, as the ResourceQuota plugin does.

    A change of `spec.hard` counts at once. In a real cluster a controller copies it into the status first.
    """
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    items = sorted(storage.collection("resourcequotas").items.items())
    quotas = [item.obj for key, item in items if key[0] == namespace]
    if not quotas:
        return
    live = [
        usage(item.obj)
        for key, item in storage.collection("pods").items.items()
        if key[0] == namespace and item.obj["status"].get("phase") not in ("Succeeded", "Failed")
    ]
    wanted = usage(pod)
    for quota in quotas:
        hard = {k: parse_quantity(v) for k, v in (quota["spec"].get("hard") or {}).items()}
        used = {k: sum((u.get(k, Fraction(0)) for u in live), Fraction(0)) for k in hard}
        over = sorted(k for k, limit in hard.items() if wanted.get(k) and used[k] + wanted[k] > limit)
        if over:
            requested, taken, limited = (_shown(over, amounts) for amounts in (wanted, used, hard))
            text = f"requested: {requested}, used: {taken}, limited: {limited}"
            raise forbidden("pods", name, f"exceeded quota: {quota['metadata']['name']}, {text}")


def _shown(names: list[str], amounts: dict[str, Fraction]) -> str:
    return ",".join(f"{n}={_quantity(amounts[n])}" for n in names)


def _quantity(amount: Fraction) -> str:
    return canonical(f"{-(-amount * 1000 // 1)}m")
