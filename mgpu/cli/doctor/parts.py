"""Whether all parts are there, are one version, and one alone decides. Pure."""

from collections.abc import Iterator

from mgpu.cli.doctor.seen import SCHEDULER, Finding, Level, Raw, Seen, hooks
from mgpu.dialects import mtgpu
from mgpu.kube.leader import LABEL
from mgpu.model.agent_pods import is_ready
from mgpu.model.device_object import DEVICE_API
from mgpu.presentation.plain_text import listed
from mgpu.version import VERSION, VERSION_LABEL, read_agent

DECIDES = "scheduler"
_DEPLOYMENT = "mgpu-scheduler"
_WEBHOOK = "mgpu-webhook"
_PATH = "/bind-admission"
_NO_ELECTION = "--no-leader-elect"
_POD_UID = "MGPU_SCHEDULER__PODUID"


def installed(seen: Seen) -> Iterator[Finding]:
    """Where it is not, or not in this namespace: the other checks would say of all else that it is missing."""
    names = (seen.settings.webhook.configuration, seen.settings.scheduler.configuration)
    configurations = [raw for rows in seen.configurations.values() for raw in rows if raw["metadata"]["name"] in names]
    services = [(hook.get("clientConfig") or {}).get("service") for raw in configurations for hook in hooks(raw)]
    elsewhere = sorted({str(service["namespace"]) for service in services if service} - {seen.namespace})
    known = not {"deployments", "daemonsets", *seen.configurations} & seen.hidden.keys()
    if known and not configurations and not seen.workloads:
        remedy = f"docs/install.md; doctor -n NAMESPACE where it is in another than {seen.namespace}"
        yield Finding("installation", Level.FAILED, "mgpu is not installed in this cluster", remedy)
    elif elsewhere and not seen.workloads:
        text = f"nothing of it is in namespace {seen.namespace}, and its webhooks lead to {listed(elsewhere)}"
        yield Finding("installation", Level.FAILED, text, f"doctor -n {elsewhere[0]}")


def custom_resources(seen: Seen) -> Iterator[Finding]:
    wanted = {"devices": ("Device", DEVICE_API)}
    if mtgpu.enabled(seen.settings):
        wanted["mtgpupods"] = (mtgpu.KIND, mtgpu.API_VERSION)
    missing = [f"{kind} ({version})" for name, (kind, version) in wanted.items() if name not in seen.served]
    if missing:
        text = f"the CRD of {' and of '.join(missing)} is missing"
        yield Finding("custom resources", Level.FAILED, text, "kubectl apply -k manifests/crds")
    else:
        kinds = " and ".join(kind for kind, _ in wanted.values())
        yield Finding("custom resources", Level.OK, f"{kinds} {'are' if len(wanted) > 1 else 'is'} served")


def one_decides(seen: Seen) -> Iterator[Finding]:
    """Two would give the same card out twice: each keeps accounts of its own."""
    found = list(_several(seen)) or list(_none(seen)) or list(_led_astray(seen))
    for text, remedy in found:
        yield Finding(DECIDES, Level.FAILED, text, remedy)
    leading = _leading_here(seen)
    if not found and leading:
        yield Finding(DECIDES, Level.OK, f"{leading[0]['spec']['holderIdentity']} decides, alone")
    elif not found and seen.bound.denied:
        yield Finding(DECIDES, Level.OK, "one decides, as far as is to be seen; it keeps no Lease")


def _none(seen: Seen) -> Iterator[tuple[str, str]]:
    """Of one that runs as a Deployment here; else it may well have been started by hand."""
    if _DEPLOYMENT in seen.workloads:
        remedy = (
            f"kubectl -n {seen.namespace} get lease,pods; kubectl -n {seen.namespace} logs deployment/{_DEPLOYMENT}"
        )
        if "pods" not in seen.hidden and not any(map(is_ready, seen.of_component(SCHEDULER))):
            yield f"none decides: no replica of Deployment {_DEPLOYMENT} is ready", remedy
        elif _elects(seen) and "leases" not in seen.hidden and not _leading_here(seen):
            yield f"none decides: nobody renews the Lease {_DEPLOYMENT}", f"{remedy}; is the clock right here?"


def _led_astray(seen: Seen) -> Iterator[tuple[str, str]]:
    """Of the Service, which chooses its Pods by a label that the leader sets: nothing is decided wrongly, but late."""
    if _DEPLOYMENT not in seen.workloads:
        return
    # One that ends leads until it has gone.
    pods = [pod["metadata"] for pod in seen.of_component(SCHEDULER, ending=True)]
    labelled = sorted(meta["name"] for meta in pods if meta["labels"].get(LABEL) == "true")
    remedy = f"its leader sees to that every few seconds: kubectl -n {seen.namespace} logs deployment/{_DEPLOYMENT}"
    if len(labelled) > 1:
        yield f"the Service leads to {listed(labelled)}: bindings that reach one that does not lead wait", remedy
    elif not labelled and "pods" not in seen.hidden:
        nowhere = f"the Service leads nowhere: no Pod has the label {LABEL}, and all bindings are decided late"
        if _POD_UID in {variable["name"] for c in _containers(seen) for variable in c.get("env") or ()}:
            yield nowhere, remedy
        else:
            yield f"{nowhere}; none knows its uid", f"set {_POD_UID} in Deployment {_DEPLOYMENT} as manifests/base does"


def _leading_here(seen: Seen) -> list[Raw]:
    return [lease for lease in seen.leading() if lease["metadata"]["namespace"] == seen.namespace]


def _several(seen: Seen) -> Iterator[tuple[str, str]]:
    led = sorted(lease["metadata"]["namespace"] for lease in seen.leading())
    configurations = seen.configurations.get("mutatingwebhookconfigurations", ())
    deciding = sorted(raw["metadata"]["name"] for raw in configurations if any(map(_decides, hooks(raw))))
    up = sorted(pod["metadata"]["name"] for pod in seen.of_component(SCHEDULER) if is_ready(pod))
    replicas = int((seen.workloads.get(_DEPLOYMENT, {}).get("spec") or {}).get("replicas", 1))
    if len(led) > 1:
        remedy = "one installation for a cluster: undeploy the other (make undeploy)"
        yield f"two schedulers decide: in namespaces {listed(led)} one leads each", remedy
    elif len(deciding) > 1:
        remedy = (
            f"kubectl delete mutatingwebhookconfiguration {' or '.join(deciding)}, whichever is not this installation's"
        )
        yield f"two schedulers decide: {listed(deciding)} both answer bindings", remedy
    elif not _elects(seen) and max(replicas, len(up)) > 1:
        text = f"two schedulers decide: leader election is off, and there are {max(replicas, len(up))} replicas"
        yield text, "take scheduler.leaderElect: false (--no-leader-elect) out, or scale to one replica"


def _decides(hook: Raw) -> bool:
    config = hook.get("clientConfig") or {}
    path = str((config.get("service") or {}).get("path") or config.get("url") or "")
    return path.endswith(_PATH)


def _containers(seen: Seen) -> list[Raw]:
    """Of the Deployment. Beside a kube-scheduler the process is a sidecar."""
    pod = (((seen.workloads.get(_DEPLOYMENT) or {}).get("spec") or {}).get("template") or {}).get("spec") or {}
    return [*(pod.get("initContainers") or ()), *(pod.get("containers") or ())]


def _elects(seen: Seen) -> bool:
    arguments = [word for c in _containers(seen) for word in (*(c.get("command") or ()), *(c.get("args") or ()))]
    return seen.settings.scheduler.leader_elect and _NO_ELECTION not in arguments


def versions(seen: Seen) -> Iterator[Finding]:
    parts: dict[str, list[str]] = {}
    for part, version in _said(seen):
        parts.setdefault(version, []).append(part)
    check = "versions"
    if len(parts) > 1:
        rows = (f"{version}: {listed(parts[version])}" for version in sorted(parts))
        remedy = f"let the rollout end (kubectl -n {seen.namespace} get pods), or apply one version to all parts"
        yield Finding(check, Level.FAILED, f"not all parts have the same: {'; '.join(rows)}", remedy)
    elif not parts:
        yield Finding(check, Level.WARNING, "no part says its version; those before 0.1.0 do not", "upgrade them")
    elif seen.own not in parts:
        text = f"all parts have {next(iter(parts))}, and this command is {seen.own}"
        yield Finding(check, Level.WARNING, text, "install the same version here")
    else:
        yield Finding(check, Level.OK, f"all parts have {seen.own}")


def _said(seen: Seen) -> Iterator[tuple[str, str]]:
    """(part, version)."""
    for lease in _leading_here(seen):
        version = (lease["metadata"].get("annotations") or {}).get(VERSION)
        if version:
            yield "scheduler", version
    template = ((seen.workloads.get(_WEBHOOK) or {}).get("spec") or {}).get("template") or {}
    version = ((template.get("metadata") or {}).get("labels") or {}).get(VERSION_LABEL)
    if version:
        yield "webhook", str(version)
    for node in seen.nodes:
        agent = read_agent(node)
        if agent:
            yield f"agent of {node['metadata']['name']}", agent.version
