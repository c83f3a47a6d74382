"""Reads from the API what the checks are about; nothing is written: what is tried is a dry run."""

from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from mgpu.cli import reading
from mgpu.cli.doctor.callers import ENDPOINTS, variables
from mgpu.cli.doctor.records import CONFIG_MAP, sealing, texts_of
from mgpu.cli.doctor.seen import COMPONENT, Raw, Sealing, Secret, Seen, Tried, serves_gpus
from mgpu.dialects import mtgpu
from mgpu.dialects.record_verification import RecordVerifier
from mgpu.kube import Api, ApiError
from mgpu.kube.secrets import SecretStore
from mgpu.model.device_object import DEVICE_API
from mgpu.model.errors import BadObject
from mgpu.presentation.overview import overview
from mgpu.serving.record_keys import read_public
from mgpu.settings import Settings
from mgpu.version import own_version

T = TypeVar("T")
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1"
LEASE = "mgpu-scheduler"
KINDS = ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")
_WORKLOADS = {"mgpu-webhook": "deployments", "mgpu-scheduler": "deployments", "mgpu-deviceplugin": "daemonsets"}
_TRIED = "mgpu-doctor"
_BINDINGS = 3
"""Tries: the webhook has a second to answer, and one that did not tells nothing."""
_SEPARATE = "vke.volcengine.com/mgpu-core", "aliyun.com/gpu-mem"


def look(api: Api, namespace: str, settings: Settings, try_in: str) -> Seen:
    """try_in: the namespace of the Pod that is tried. Raises Unreachable, and ApiError for what is no refusal."""
    hidden: dict[str, str] = {}

    def may(what: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except ApiError as error:
            if error.status == 403:
                hidden[what] = error.message
            elif error.status != 404:
                raise
            return otherwise

    def listing(path: str) -> list[Raw]:
        return may(path.rpartition("/")[2], lambda: list(api.list(path)[0]), [])

    workloads: dict[str, Raw] = {
        name: may(kind, partial[Raw](api.get, f"/apis/apps/v1/namespaces/{namespace}/{kind}/{name}"), {})
        for name, kind in _WORKLOADS.items()
    }
    services = (settings.webhook.service, settings.scheduler.service)
    secrets = {name: _secret(api, namespace, name, workloads.get(name, {}), may) for name in services}
    leases = listing("/apis/coordination.k8s.io/v1/leases")
    nodes, devices = listing("/api/v1/nodes"), listing(f"/apis/{DEVICE_API}/devices")
    pods: list[Raw] = may("pods", lambda: list(reading.pods(api)), [])
    keys_path = f"/api/v1/namespaces/{namespace}/configmaps/{CONFIG_MAP}"
    keys: Raw = may(f"configmap {CONFIG_MAP}", lambda: api.get(keys_path), {})
    return Seen(
        namespace,
        datetime.now(UTC),
        own_version(),
        settings,
        tried(api, try_in),
        tried_binding(api, try_in),
        frozenset((*_resources(api, DEVICE_API), *_resources(api, mtgpu.API_VERSION))),
        {kind: listing(f"{CONFIGURATIONS}/{kind}") for kind in KINDS},
        {name: secret for name, secret in secrets.items() if secret.files},
        [lease for lease in leases if lease["metadata"]["name"] == LEASE],
        nodes,
        {raw["metadata"]["name"]: raw for raw in devices},
        [pod for pod in pods if _own(pod, namespace) or serves_gpus(pod)],
        overview(nodes, devices, pods, settings, reading.unhealthy_lists(api), reading.mtgpupods(api)),
        {name: raw for name, raw in workloads.items() if raw},
        hidden,
        {
            name: text
            for key, workload in ENDPOINTS.items()
            for name, text in _environment(api, namespace, workloads[workload], variables(key), may)
        },
        _sealing(keys, pods, settings),
    )


def _sealing(config_map: Raw, pods: Sequence[Raw], settings: Settings) -> Sealing | BadObject | None:
    if not config_map:
        return None
    try:
        return sealing(
            RecordVerifier(read_public(CONFIG_MAP, texts_of(config_map)), frozenset(settings.records.peers)), pods
        )
    except BadObject as error:
        return error


def _environment(
    api: Api, namespace: str, workload: Raw, wanted: Collection[str], may: Any
) -> Iterator[tuple[str, str]]:
    """The values of these variables in a Deployment, also those that it takes from a ConfigMap."""
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
                data = may(f"configmap {source['name']}", partial[Raw](api.get, path), {}).get("data") or {}
                if source["key"] in data:
                    yield variable["name"], str(data[source["key"]])


def tried(api: Api, namespace: str) -> Tried:
    """A Pod that asks in two vocabularies: denied under all settings. Everything else about it pleases everybody."""
    amounts = dict.fromkeys(_SEPARATE, "1")
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
        "metadata": {"generateName": f"{_TRIED}-", "namespace": namespace},
        "spec": {"containers": [container], "securityContext": secured, "restartPolicy": "Never"},
    }
    return _dry_run(api, f"/api/v1/namespaces/{namespace}/pods", pod)


def tried_binding(api: Api, namespace: str) -> Tried:
    """A Binding of a Pod that is not there: refused in any case, and by whom says whether bindings come to mgpu.

    Webhooks are asked before the API server looks for the Pod, and `failurePolicy: Ignore` hides all else.
    """
    meta, target = {"name": _TRIED, "namespace": namespace}, {"kind": "Node", "name": _TRIED}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": target}
    path, tried = f"/api/v1/namespaces/{namespace}/pods/{_TRIED}/binding", Tried()
    for _ in range(_BINDINGS):
        tried = _dry_run(api, path, binding)
        if tried.denied:
            break
    return tried


def _dry_run(api: Api, path: str, body: Raw) -> Tried:
    try:
        api.create(path, body, dryRun="All")
    except ApiError as error:
        return Tried(error.status, error.message)
    return Tried(201)


def _resources(api: Api, group_version: str) -> Iterator[str]:
    try:
        found = api.get(f"/apis/{group_version}").get("resources") or ()
    except ApiError as error:
        if error.status != 404:
            raise
        return
    yield from (str(row["name"]) for row in found)


def _own(pod: Raw, namespace: str) -> bool:
    meta = pod["metadata"]
    return meta.get("namespace") == namespace and COMPONENT in (meta.get("labels") or {})


def _secret(api: Api, namespace: str, service: str, workload: Raw, may: Any) -> Secret:
    """The one that the Deployment mounts, else that in which the process keeps its own."""
    pod = ((workload.get("spec") or {}).get("template") or {}).get("spec") or {}
    mounted = [
        str(v["secret"]["secretName"]) for v in pod.get("volumes") or () if v.get("secret", {}).get("secretName")
    ]
    name = mounted[0] if mounted else f"{service}-tls"
    files: dict[str, bytes] = may(f"secret {name}", lambda: dict(SecretStore(api, namespace, name).read()[0]), {})
    return Secret(name, files, ours=not mounted)
