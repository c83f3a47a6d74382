"""Reads the Installation for the checks of `mgpu doctor`.

The command must not write anything, so objects are created only as dry runs. The command must not fail because of an
object that the user may not read.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from mgpu.cli import cluster_objects
from mgpu.cli.doctor import commands, kueue
from mgpu.cli.doctor.callers import ENDPOINTS, environment_variables
from mgpu.cli.doctor.claims import ENVIRONMENT, claim_hooks, read_claim_support
from mgpu.cli.doctor.installation import COMPONENT, DryRun, Installation, Raw, Sealing, Secret, is_nvidia_plugin
from mgpu.cli.doctor.records import CONFIG_MAP, verify_records
from mgpu.dialects import mtgpu
from mgpu.dialects.record_verification import RecordVerifier
from mgpu.kube import Api, ApiError
from mgpu.kube.secrets import SecretStore
from mgpu.model.device_object import DEVICE_API
from mgpu.model.errors import BadObject
from mgpu.model.resource_claims import CLAIMS
from mgpu.presentation.claim_views import read_claims
from mgpu.presentation.overview import Overview, make_overview
from mgpu.serving.record_keys import read_public_keys
from mgpu.settings import Settings
from mgpu.version import own_version

T = TypeVar("T")
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1"
LEASE = "mgpu-scheduler"
KINDS = ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")
_WORKLOADS = {"mgpu-webhook": "deployments", "mgpu-scheduler": "deployments", "mgpu-deviceplugin": "daemonsets"}
_DRY_RUN_NAME = "mgpu-doctor"
_BINDING_ATTEMPTS = 3
"""The most dry runs of a Binding. The webhook has only one second to answer. After a timeout the API server accepts the
Binding without its answer, so a single dry run does not show that the webhook cannot be reached."""
_TWO_VOCABULARIES = "vke.volcengine.com/mgpu-core", "aliyun.com/gpu-mem"


def read_installation(api: Api, namespace: str, settings: Settings, try_in: str) -> Installation:
    """Return a snapshot of the installation.

    What the user may not read (403) is listed in `hidden`, except for gpushare's lists of unhealthy cards. Such
    objects, and objects that do not exist (404), are left out.

    Args:
        namespace: the namespace of the installation.
        try_in: the namespace of the dry runs.

    Raises:
        Unreachable: if the API server does not answer.
        ApiError: if the API server answers with any other error.
    """
    hidden: dict[str, str] = {}

    def read_if_allowed(what: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except ApiError as error:
            if error.status == 403:
                hidden[what] = error.message
            elif error.status != 404:
                raise
            return otherwise

    def listing(path: str) -> list[Raw]:
        return read_if_allowed(path.rpartition("/")[2], lambda: list(api.list(path)[0]), [])

    workloads: dict[str, Raw] = {
        name: read_if_allowed(kind, partial[Raw](api.get, f"/apis/apps/v1/namespaces/{namespace}/{kind}/{name}"), {})
        for name, kind in _WORKLOADS.items()
    }
    services = (settings.webhook.service, settings.scheduler.service)
    secrets = {name: _secret(api, namespace, name, workloads.get(name, {}), read_if_allowed) for name in services}
    leases = listing("/apis/coordination.k8s.io/v1/leases")
    nodes = listing("/api/v1/nodes")
    devices = listing(f"/apis/{DEVICE_API}/devices")
    pods: list[Raw] = read_if_allowed("pods", lambda: list(cluster_objects.pods(api)), [])
    keys_path = f"/api/v1/namespaces/{namespace}/configmaps/{CONFIG_MAP}"
    scheduler = workloads["mgpu-scheduler"]
    overrides = dict(_environment(api, namespace, scheduler, {ENVIRONMENT}, read_if_allowed)) if scheduler else None
    configurations = {kind: listing(f"{CONFIGURATIONS}/{kind}") for kind in KINDS}
    keys: Raw = read_if_allowed(f"configmap {CONFIG_MAP}", lambda: api.get(keys_path), {})
    return Installation(
        namespace,
        datetime.now(UTC),
        own_version(),
        settings,
        try_pod(api, try_in),
        try_binding(api, try_in),
        frozenset((*_resources(api, DEVICE_API), *_resources(api, mtgpu.API_VERSION))),
        configurations,
        {name: secret for name, secret in secrets.items() if secret.files},
        [lease for lease in leases if lease["metadata"]["name"] == LEASE],
        nodes,
        {raw["metadata"]["name"]: raw for raw in devices},
        [pod for pod in pods if _is_own(pod, namespace) or is_nvidia_plugin(pod)],
        _overview(api, settings, nodes, devices, pods, listing),
        {name: raw for name, raw in workloads.items() if raw},
        hidden,
        _endpoints(api, namespace, workloads, read_if_allowed),
        _sealing(keys, pods, settings),
        read_kueue(api, read_if_allowed),
        commands.ask(api, namespace),
        read_claim_support(api, settings, overrides, claim_hooks(configurations), read_if_allowed),
    )


def _overview(
    api: Api,
    settings: Settings,
    nodes: list[Raw],
    devices: list[Raw],
    pods: list[Raw],
    listing: Callable[[str], list[Raw]],
) -> Overview:
    """Return the cards and what holds them."""
    unhealthy = cluster_objects.unhealthy_lists(api)
    claims = read_claims(listing(CLAIMS))
    return make_overview(nodes, devices, pods, settings, unhealthy, listing(mtgpu.COLLECTION), claims)


def _endpoints(api: Api, namespace: str, workloads: Mapping[str, Raw], read_if_allowed: Any) -> dict[str, str]:
    """Return the environment variables of the workloads that set the endpoints of mgpu's processes."""
    return {
        name: text
        for key, workload in ENDPOINTS.items()
        for name, text in _environment(api, namespace, workloads[workload], environment_variables(key), read_if_allowed)
    }


def read_kueue(api: Api, read_if_allowed: Any) -> str | None:
    """Return the text of Kueue's configuration; "" if it was not found, and None if the cluster has no Kueue."""
    if not read_if_allowed("Kueue's API group", partial[Raw](api.get, kueue.GROUP), {}):
        return None
    config_map = read_if_allowed(kueue.HIDDEN, partial[Raw](api.get, kueue.CONFIG_MAP_PATH), {})
    return str((config_map.get("data") or {}).get(kueue.KEY) or "")


def _sealing(config_map: Raw, pods: Sequence[Raw], settings: Settings) -> Sealing | BadObject | None:
    if not config_map:
        return None
    try:
        keys = read_public_keys(CONFIG_MAP, config_map.get("data") or {})
        return verify_records(RecordVerifier(keys, frozenset(settings.records.peers)), pods)
    except BadObject as error:
        return error


def _environment(
    api: Api, namespace: str, workload: Raw, wanted: Collection[str], read_if_allowed: Any
) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the `wanted` variables in a Deployment, including values from ConfigMaps."""
    pod = ((workload.get("spec") or {}).get("template") or {}).get("spec") or {}
    for container in (*(pod.get("initContainers") or ()), *(pod.get("containers") or ())):
        for variable in container.get("env") or ():
            if variable["name"] not in wanted:
                continue
            source = (variable.get("valueFrom") or {}).get("configMapKeyRef")
            if "value" in variable:
                yield variable["name"], str(variable["value"])
            elif source:
                path = f"/api/v1/namespaces/{namespace}/configmaps/{source['name']}"
                data = read_if_allowed(f"configmap {source['name']}", partial[Raw](api.get, path), {}).get("data") or {}
                if source["key"] in data:
                    yield variable["name"], str(data[source["key"]])


def try_pod(api: Api, namespace: str) -> DryRun:
    """Create, as a dry run, a Pod that uses two vocabularies, and return the answer.

    mgpu denies such a Pod under all settings. The Pod meets the Pod Security Standard `restricted`, so that Pod
    Security admission does not deny it first.
    """
    amounts = dict.fromkeys(_TWO_VOCABULARIES, "1")
    container = {
        "name": "doctor",
        "image": "mgpu",
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    secured = {"runAsNonRoot": True, "runAsUser": 65534, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": f"{_DRY_RUN_NAME}-", "namespace": namespace},
        "spec": {"containers": [container], "securityContext": secured, "restartPolicy": "Never"},
    }
    return _dry_run(api, f"/api/v1/namespaces/{namespace}/pods", pod)


def try_binding(api: Api, namespace: str) -> DryRun:
    """Create, as a dry run, a Binding of a Pod that does not exist, and return the answer.

    The answer shows whether mgpu has denied the Binding, since the API server calls webhooks before it reads the Pod.
    With `failurePolicy: Ignore` there is no other way to detect a webhook that cannot be reached.
    """
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": _DRY_RUN_NAME, "namespace": namespace},
        "target": {"kind": "Node", "name": _DRY_RUN_NAME},
    }
    path = f"/api/v1/namespaces/{namespace}/pods/{_DRY_RUN_NAME}/binding"
    answer = DryRun()
    for _ in range(_BINDING_ATTEMPTS):
        answer = _dry_run(api, path, binding)
        if answer.is_denied:
            break
    return answer


def _dry_run(api: Api, path: str, body: Raw) -> DryRun:
    try:
        api.create(path, body, dryRun="All")
    except ApiError as error:
        return DryRun(error.status, error.message)
    return DryRun(201)


def _resources(api: Api, group_version: str) -> Iterator[str]:
    try:
        found = api.get(f"/apis/{group_version}").get("resources") or ()
    except ApiError as error:
        if error.status != 404:
            raise
        return
    yield from (str(row["name"]) for row in found)


def _is_own(pod: Raw, namespace: str) -> bool:
    meta = pod["metadata"]
    return meta.get("namespace") == namespace and COMPONENT in (meta.get("labels") or {})


def _secret(api: Api, namespace: str, service: str, workload: Raw, read_if_allowed: Any) -> Secret:
    """Return the first Secret that the Deployment mounts or, if it mounts none, the one that the process writes."""
    pod = ((workload.get("spec") or {}).get("template") or {}).get("spec") or {}
    mounted = [
        str(v["secret"]["secretName"]) for v in pod.get("volumes") or () if v.get("secret", {}).get("secretName")
    ]
    name = mounted[0] if mounted else f"{service}-tls"
    files: dict[str, bytes] = read_if_allowed(
        f"secret {name}", lambda: dict(SecretStore(api, namespace, name).read()[0]), {}
    )
    return Secret(name, files, is_renewed_by_mgpu=not mounted)
