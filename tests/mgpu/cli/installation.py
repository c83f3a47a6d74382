"""An installation without faults: objects in an API server, and the real webhook."""

import base64
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flask import Response
from werkzeug.serving import WSGIRequestHandler, make_server

from deviceplugin.inventory.offers import id_resources, status_amounts
from mgpu.kube import Api, ApiError
from mgpu.kube.leader import LABEL, Leader
from mgpu.model.device_object import DEVICE_API, write_device
from mgpu.model.pods import read_node
from mgpu.model.record_seals import key_id
from mgpu.presentation.answers import CLUSTER_PATH, READER, VERSION_HEADER, ClusterAnswer, encode_cluster
from mgpu.presentation.overview import Overview
from mgpu.serving.app import serve_reviews
from mgpu.serving.callers import Callers, restrict_callers
from mgpu.serving.certificate_folder import CertificateFolder
from mgpu.serving.certificates import CA, Files, ensure_certificate
from mgpu.settings import load_settings
from mgpu.version import AGENT_ANNOTATION, VERSION_LABEL, AgentReport, own_version, write_agent_report
from playground.apiserver import ApiServer
from playground.installation import located, manifests
from scheduler.api.binding_webhook import BindingAdmission
from scheduler.cluster.cache import ClusterCache
from scheduler.decisions.decider import Decider
from tests.builders import cards, node
from webhook.admission import make_app

SYSTEM, COLLECTIONS = "mgpu-system", "/apis/admissionregistration.k8s.io/v1"
NODES, DEVICES = "/api/v1/nodes", f"/apis/{DEVICE_API}/devices"
PODS, APPS = f"/api/v1/namespaces/{SYSTEM}/pods", f"/apis/apps/v1/namespaces/{SYSTEM}"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
MUTATING, VALIDATING = "mutatingwebhookconfigurations", "validatingwebhookconfigurations"
_PATHS = {
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "MutatingWebhookConfiguration": f"{COLLECTIONS}/{MUTATING}",
    "ValidatingWebhookConfiguration": f"{COLLECTIONS}/{VALIDATING}",
}
NAMES = ("127.0.0.1",)


@cache
def _manifests() -> tuple[dict[str, Any], ...]:
    """Read the manifests once, because it is slow."""
    return tuple(manifests())


class _Silent(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass


def _behind(app: Any, callers: Callers) -> Any:
    """Return the app with limited callers. werkzeug has another name for the connection than gunicorn."""
    door = restrict_callers(app, callers)
    return lambda environ, start: door({**environ, "gunicorn.socket": environ["werkzeug.socket"]}, start)


def _empty_cluster() -> Response:
    """Answer as the scheduler answers the commands."""
    lines = encode_cluster(ClusterAnswer(Overview(())), ())
    return Response(b"".join(lines), headers={VERSION_HEADER: own_version()})


@contextmanager
def webhook(files: Files, folder: Path, api: Api, callers: Callers | None = None) -> Iterator[int]:
    """Serve the webhook's app, and the scheduler's admission of Bindings and its answer to the commands."""
    kept = CertificateFolder(folder)
    kept.put(files)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(kept.chain, kept.key)
    app, settings = make_app(load_settings()), load_settings()
    decider = Decider(ClusterCache(settings), api, settings)
    serve_reviews(app, "/bind-admission", BindingAdmission(decider, lambda: None), kinds=("Binding",))
    app.add_url_rule(CLUSTER_PATH, view_func=_empty_cluster)
    served = _behind(app.wsgi_app, callers) if callers else app.wsgi_app
    server = make_server("127.0.0.1", 0, served, threaded=True, ssl_context=context, request_handler=_Silent)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def certificate(folder: Path, *, days_old: int = 0) -> Files:
    return ensure_certificate(CertificateFolder(folder), NAMES, datetime.now(UTC) - timedelta(days=days_old))


def keep_in_secret(api: Api, name: str, files: Files) -> None:
    """Create or replace the Secret, as an installation does."""
    path = f"/api/v1/namespaces/{SYSTEM}/secrets"
    data = {key: base64.b64encode(content).decode() for key, content in files.items()}
    secret = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "data": data}
    try:
        api.create(path, {**secret, "metadata": {"name": name}})
    except ApiError as error:
        if error.status != 409:
            raise
        api.replace(f"{path}/{name}", {**api.get(f"{path}/{name}"), "data": data})


def trust(api: Api, kind: str, name: str, ca: bytes) -> None:
    """Set the CA bundle of every webhook of a configuration."""
    found = api.get(f"{COLLECTIONS}/{kind}/{name}")
    for hook in found["webhooks"]:
        hook["clientConfig"]["caBundle"] = base64.b64encode(ca).decode()
    api.replace(f"{COLLECTIONS}/{kind}/{name}", found)


@dataclass
class Installation:
    """The objects of an installation. api: of an administrator."""

    api: Api

    def install(self, files: Files, port: int) -> None:
        api = self.api
        for manifest in _manifests():
            if manifest["kind"] in _PATHS:
                services = ("mgpu-webhook", "mgpu-scheduler")
                found = located(manifest, dict.fromkeys(services, port), dict.fromkeys(services, files[CA]))
                for hook in found.get("webhooks") or ():
                    hook["timeoutSeconds"] = 30  # the machine may be busy with other tests
                api.create(_PATHS[manifest["kind"]], found)
        self.trust(files)
        signer = Ed25519PrivateKey.generate().public_key()
        keys = {f"{key_id(signer)}.pem": signer.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()}
        data = {**keys, "since": "2100-01-01T00:00:00Z"}  # the records of these tests are older
        api.create(f"/api/v1/namespaces/{SYSTEM}/configmaps", {"metadata": {"name": "mgpu-record-keys"}, "data": data})
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": READER}}
        api.create(f"/api/v1/namespaces/{SYSTEM}/serviceaccounts", account)
        for name in ("mgpu-webhook", "mgpu-scheduler"):
            self.workload("deployments", "Deployment", name, 2)
        self.workload("daemonsets", "DaemonSet", "mgpu-deviceplugin")
        for name, on in (("mgpu-scheduler-a", "n1"), ("mgpu-scheduler-b", "n2")):
            self.pod(name, "scheduler", on)
        self.leads("mgpu-scheduler-a")
        for name in ("n1", "n2"):
            self.node(name)
            self.pod(f"mgpu-deviceplugin-{name}", "deviceplugin", name)

    def elect(self) -> None:
        """Create the Lease, which is valid for some seconds."""
        Leader(self.api, SYSTEM, "mgpu-scheduler", "mgpu-scheduler-a").round()

    def trust(self, files: Files) -> None:
        """Set the Secrets and the CA bundles of the webhook configurations."""
        for name in ("mgpu-webhook", "mgpu-scheduler"):
            keep_in_secret(self.api, f"{name}-tls", files)
            trust(self.api, MUTATING, name, files[CA])
        trust(self.api, VALIDATING, "mgpu-webhook", files[CA])
        trust(self.api, MUTATING, "0-mgpu-webhook", files[CA])

    def workload(self, plural: str, kind: str, name: str, replicas: int = 0, *arguments: str) -> None:
        labels = {"app": name}
        uid = {"name": "MGPU_SCHEDULER__PODUID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
        env = [uid] if name == "mgpu-scheduler" else []
        spec: dict[str, Any] = {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels | {VERSION_LABEL: own_version()}},
                "spec": {"containers": [{"name": "c", "image": "mgpu", "args": list(arguments), "env": env}]},
            },
            **({"replicas": replicas} if replicas else {}),
        }
        body = {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "namespace": SYSTEM}, "spec": spec}
        self.api.create(f"{APPS}/{plural}", body)

    def pod(
        self, name: str, component: str, on: str, *, ready: bool = True, image: str = "mgpu", container: str = "c"
    ) -> None:
        meta = {"name": name, "namespace": SYSTEM, "labels": {"app.kubernetes.io/component": component}}
        spec = {"nodeName": on, "containers": [{"name": container, "image": image}]}
        made = self.api.create(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        row = {"type": "Ready", "status": "True" if ready else "False"}
        self.api.replace(f"{PODS}/{name}/status", {**made, "status": {"phase": "Running", "conditions": [row]}})

    def leads(self, pod: str, value: str | None = "true") -> None:
        """Set the label of the Pod by which the Service selects the leader."""
        self.api.patch(f"{PODS}/{pod}", {"metadata": {"labels": {LABEL: value}}})

    def node(self, name: str, *, gpus: int = 2) -> None:
        own, settings = cards(gpus, node=name), load_settings()
        raw = node(name, labels={"mgpu.io/gpu": "true"})
        counted = {r.name: sum(amount for _, amount in r.amounts) for r in id_resources(own, settings)}
        amounts = {resource: str(amount) for resource, amount in (counted | status_amounts(own, settings)).items()}
        for key in ("capacity", "allocatable"):
            raw["status"][key] |= amounts
        raw["metadata"]["annotations"][AGENT_ANNOTATION] = write_agent_report(
            AgentReport(own_version(), True, gpus, "mgpu")
        )
        made = self.api.create(NODES, raw)
        self.api.create(DEVICES, write_device(read_node(raw), made["metadata"]["uid"], own))

    def says(self, name: str, **changes: Any) -> None:
        """Change the report of the node's agent."""
        said = AgentReport(own_version(), True, 2, "mgpu")._replace(**changes)
        self.api.patch(f"{NODES}/{name}", {"metadata": {"annotations": {AGENT_ANNOTATION: write_agent_report(said)}}})


@contextmanager
def restored(server: ApiServer) -> Iterator[None]:
    """Undo every change of objects when the context ends. A stored object is never changed in place."""
    before = {resource: dict(collection.items) for resource, collection in server.storage.collections().items()}
    yield
    for definition in before["customresourcedefinitions.apiextensions.k8s.io"].values():
        server.registry.define(definition.obj)
    for resource in before.keys() | server.storage.collections().keys():
        server.storage.collection(resource).items = before.get(resource, {})
