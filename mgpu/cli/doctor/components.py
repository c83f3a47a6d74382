"""Checks that all parts are installed and have one version, and that exactly one scheduler decides.

`mgpu doctor` runs these checks. `check_installed` must run first: if mgpu is not installed, the other checks must be
skipped, because they would report only consequences of that.
"""

from collections.abc import Iterator

from mgpu.cli.doctor.installation import SCHEDULER, Finding, Installation, Level, Raw, webhooks_of
from mgpu.dialects import mtgpu
from mgpu.kube.leader import LABEL
from mgpu.model.agent_pods import is_ready
from mgpu.model.device_object import DEVICE_API
from mgpu.presentation.plain_text import join_names
from mgpu.version import VERSION_ANNOTATION, VERSION_LABEL, read_agent_report

SINGLE_SCHEDULER = "scheduler"
_DEPLOYMENT = "mgpu-scheduler"
_WEBHOOK = "mgpu-webhook"
_PATH = "/bind-admission"
_NO_ELECTION = "--no-leader-elect"
_POD_UID = "MGPU_SCHEDULER__PODUID"


def check_installed(installation: Installation) -> Iterator[Finding]:
    """Report if mgpu is not installed, or is installed only in another namespace."""
    names = (installation.settings.webhook.configuration, installation.settings.scheduler.configuration)
    configurations = [
        raw for rows in installation.configurations.values() for raw in rows if raw["metadata"]["name"] in names
    ]
    services = [(hook.get("clientConfig") or {}).get("service") for raw in configurations for hook in webhooks_of(raw)]
    elsewhere = sorted({str(service["namespace"]) for service in services if service} - {installation.namespace})
    all_read = not {"deployments", "daemonsets", *installation.configurations} & installation.hidden.keys()
    if all_read and not configurations and not installation.workloads:
        remedy = f"see docs/install.md; if its namespace is not {installation.namespace}, run doctor -n NAMESPACE"
        yield Finding("installation", Level.FAILED, "mgpu is not installed in this cluster", remedy)
    elif elsewhere and not installation.workloads:
        text = f"namespace {installation.namespace} has no part of mgpu; the webhooks refer to {join_names(elsewhere)}"
        yield Finding("installation", Level.FAILED, text, f"run doctor -n {elsewhere[0]}")


def check_custom_resources(installation: Installation) -> Iterator[Finding]:
    """Check that the API server serves the custom resources that the settings require."""
    required = {"devices": ("Device", DEVICE_API)}
    if mtgpu.enabled(installation.settings):
        required["mtgpupods"] = (mtgpu.KIND, mtgpu.API_VERSION)
    missing = [f"{kind} ({version})" for name, (kind, version) in required.items() if name not in installation.served]
    if missing:
        text = f"the CRD of {' and of '.join(missing)} is missing"
        yield Finding("custom resources", Level.FAILED, text, "kubectl apply -k manifests/crds")
    else:
        kinds = " and ".join(kind for kind, _ in required.values())
        yield Finding("custom resources", Level.OK, f"{kinds} {'are' if len(required) > 1 else 'is'} served")


def check_single_scheduler(installation: Installation) -> Iterator[Finding]:
    """Check that exactly one scheduler decides, and that the Service selects it.

    Several schedulers would allocate a card several times, because each has a ledger of its own.
    """
    problems = (
        list(_several_schedulers(installation)) or list(_no_scheduler(installation)) or list(_wrong_label(installation))
    )
    for text, remedy in problems:
        yield Finding(SINGLE_SCHEDULER, Level.FAILED, text, remedy)
    leases = _own_leases(installation)
    if not problems and leases:
        yield Finding(SINGLE_SCHEDULER, Level.OK, f"{leases[0]['spec']['holderIdentity']} is the only leader")
    elif not problems and installation.binding_dry_run.is_denied:
        yield Finding(SINGLE_SCHEDULER, Level.OK, "one scheduler found (leader election is off)")


def _no_scheduler(installation: Installation) -> Iterator[tuple[str, str]]:
    """Report if no scheduler decides.

    If there is no Deployment, the scheduler may have been started by hand, and nothing is reported.
    """
    if _DEPLOYMENT in installation.workloads:
        remedy = f"{installation.kubectl} get lease,pods; {installation.kubectl} logs deployment/{_DEPLOYMENT}"
        if "pods" not in installation.hidden and not any(map(is_ready, installation.pods_of(SCHEDULER))):
            yield f"no scheduler decides: no replica of Deployment {_DEPLOYMENT} is ready", remedy
        elif _elects(installation) and "leases" not in installation.hidden and not _own_leases(installation):
            text = f"no scheduler decides: the Lease {_DEPLOYMENT} is not renewed"
            yield text, f"{remedy}; check the clock of this machine"


def _wrong_label(installation: Installation) -> Iterator[tuple[str, str]]:
    """Report if not exactly one Pod has the label by which the Service selects the leader.

    With a wrong label, Bindings do not reach the leader, so pods get their cards late. No decision becomes wrong.
    """
    if _DEPLOYMENT not in installation.workloads:
        return
    # A Pod that is being deleted can still be the leader.
    pods = [pod["metadata"] for pod in installation.pods_of(SCHEDULER, include_deleted=True)]
    labelled = sorted(meta["name"] for meta in pods if meta["labels"].get(LABEL) == "true")
    remedy = f"the leader corrects its label every few seconds: {installation.kubectl} logs deployment/{_DEPLOYMENT}"
    if len(labelled) > 1:
        effect = "Bindings are admitted without cards if they reach a replica that does not lead"
        text = f"the Service selects {join_names(labelled)}: {effect}"
        yield text, remedy
    elif not labelled and "pods" not in installation.hidden:
        text = f"the Service selects no Pod: none has the label {LABEL}, so cards are decided late"
        if _POD_UID in {variable["name"] for c in _containers(installation) for variable in c.get("env") or ()}:
            yield text, remedy
        else:
            remedy = f"set {_POD_UID} in Deployment {_DEPLOYMENT} as manifests/base does"
            yield f"{text}; the Pods do not know their uid", remedy


def _own_leases(installation: Installation) -> list[Raw]:
    return [lease for lease in installation.held_leases() if lease["metadata"]["namespace"] == installation.namespace]


def _several_schedulers(installation: Installation) -> Iterator[tuple[str, str]]:
    namespaces = sorted(lease["metadata"]["namespace"] for lease in installation.held_leases())
    configurations = installation.configurations.get("mutatingwebhookconfigurations", ())
    deciding = sorted(raw["metadata"]["name"] for raw in configurations if any(map(_decides, webhooks_of(raw))))
    ready = sum(map(is_ready, installation.pods_of(SCHEDULER)))
    replicas = int((installation.workloads.get(_DEPLOYMENT, {}).get("spec") or {}).get("replicas", 1))
    if len(namespaces) > 1:
        remedy = "a cluster can have only one installation: remove the others (make undeploy)"
        yield f"several schedulers decide: one leads in each of the namespaces {join_names(namespaces)}", remedy
    elif len(deciding) > 1:
        names = " or ".join(deciding)
        remedy = (
            f"delete each one that belongs to another installation: kubectl delete mutatingwebhookconfiguration {names}"
        )
        yield f"several schedulers decide: {join_names(deciding)} all answer Bindings", remedy
    elif not _elects(installation) and max(replicas, ready) > 1:
        text = f"several schedulers decide: leader election is off, and there are {max(replicas, ready)} replicas"
        yield text, "remove scheduler.leaderElect: false (--no-leader-elect), or scale to one replica"


def _decides(hook: Raw) -> bool:
    config = hook.get("clientConfig") or {}
    path = str((config.get("service") or {}).get("path") or config.get("url") or "")
    return path.endswith(_PATH)


def _containers(installation: Installation) -> list[Raw]:
    """Return the containers of the scheduler's Deployment.

    Init containers are included, because mgpu can run as a sidecar container beside kube-scheduler. A sidecar container
    is an init container that keeps running.
    """
    pod = (((installation.workloads.get(_DEPLOYMENT) or {}).get("spec") or {}).get("template") or {}).get("spec") or {}
    return [*(pod.get("initContainers") or ()), *(pod.get("containers") or ())]


def _elects(installation: Installation) -> bool:
    arguments = [
        word for c in _containers(installation) for word in (*(c.get("command") or ()), *(c.get("args") or ()))
    ]
    return installation.settings.scheduler.leader_elect and _NO_ELECTION not in arguments


def check_versions(installation: Installation) -> Iterator[Finding]:
    """Check that all parts of the installation, and this command, have the same version."""
    parts: dict[str, list[str]] = {}
    for part, version in _reported_versions(installation):
        parts.setdefault(version, []).append(part)
    check = "versions"
    if len(parts) > 1:
        rows = (f"{version}: {join_names(parts[version])}" for version in sorted(parts))
        remedy = f"wait for the rollout ({installation.kubectl} get pods), or apply one version to all parts"
        yield Finding(check, Level.FAILED, f"parts have different versions: {'; '.join(rows)}", remedy)
    elif not parts:
        text = "no part reports its version; versions before 0.1.0 do not report theirs"
        yield Finding(check, Level.WARNING, text, "upgrade all parts")
    elif installation.version not in parts:
        text = f"all parts have version {next(iter(parts))}, but this command has {installation.version}"
        yield Finding(check, Level.WARNING, text, "install the same version here")
    else:
        yield Finding(check, Level.OK, f"all parts have version {installation.version}")


def _reported_versions(installation: Installation) -> Iterator[tuple[str, str]]:
    for lease in _own_leases(installation):
        version = (lease["metadata"].get("annotations") or {}).get(VERSION_ANNOTATION)
        if version:
            yield "scheduler", version
    template = ((installation.workloads.get(_WEBHOOK) or {}).get("spec") or {}).get("template") or {}
    version = ((template.get("metadata") or {}).get("labels") or {}).get(VERSION_LABEL)
    if version:
        yield "webhook", str(version)
    for node in installation.nodes:
        agent = read_agent_report(node)
        if agent:
            yield f"agent of {node['metadata']['name']}", agent.version
