"""The suite's manifests on the playground's API server: CRDs, roles, priority classes, webhooks that lead here."""

import base64
import copy
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from mgpu.kube import Api, ApiError
from mgpu.serving.certificates import new_authority
from playground.processes import StartError, until

Json = dict[str, Any]
MANIFESTS = Path(__file__).parents[1] / "manifests"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_COLLECTIONS = {
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "ClusterRole": f"{_RBAC}/clusterroles",
    "ClusterRoleBinding": f"{_RBAC}/clusterrolebindings",
    "Role": f"{_RBAC}/namespaces/{{namespace}}/roles",
    "RoleBinding": f"{_RBAC}/namespaces/{{namespace}}/rolebindings",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
    "MutatingWebhookConfiguration": "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
}
_SERVED_SECONDS = 60.0
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML was built with it: in Python alone, reading the manifests takes half of a cluster's start."""


def authorities(folder: Path) -> dict[str, Path]:
    """Make a CA for each Service, as manifests/certificates.sh does: the folder where its process finds it."""
    made = {}
    for service in ("mgpu-webhook", "mgpu-scheduler"):
        made[service] = folder / service
        made[service].mkdir(mode=0o700)
        for name, content in new_authority(datetime.now(UTC)).items():
            (made[service] / name).write_bytes(content)
    return made


def install(api: Api, ports: Mapping[str, int], bundles: Mapping[str, bytes]) -> None:
    """Create what `manifests` has; services become `127.0.0.1:<ports[service]>`.

    bundles: the CA of each Service, for the webhook configurations. Raises ApiError and StartError.
    """
    found = list(manifests())
    if not found:
        raise StartError(f"no manifests in {MANIFESTS}: the playground runs from a checkout of the project")
    for manifest in found:
        collection = _COLLECTIONS[manifest["kind"]].format(namespace=manifest["metadata"].get("namespace", ""))
        api.create(collection, located(manifest, ports, bundles))
    for manifest in found:
        if manifest["kind"] == "CustomResourceDefinition":
            spec = manifest["spec"]
            path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
            until(f"{path} is served", lambda path=path: _served(api, path), _SERVED_SECONDS)  # type: ignore[misc]


def manifests(folder: Path = MANIFESTS) -> Iterator[Json]:
    """CRDs, accounts and their roles, priority classes, webhook configurations, in a fixed order; all else needs a
    cluster with nodes.
    """
    for path in sorted([*folder.glob("crds/*.yaml"), *folder.glob("base/*.yaml")]):
        for document in yaml.load_all(path.read_text(), _Loader):
            if document and document.get("kind") in _COLLECTIONS:
                yield document


def located(manifest: Json, ports: Mapping[str, int], bundles: Mapping[str, bytes]) -> Json:
    """The manifest with URLs of this machine in place of services, and the CA bundle that belongs to each."""
    found = copy.deepcopy(manifest)
    for webhook in found.get("webhooks") or ():
        service = webhook["clientConfig"]["service"]
        bundle = base64.b64encode(bundles[service["name"]]).decode()
        url = f"https://127.0.0.1:{ports[service['name']]}{service['path']}"
        webhook["clientConfig"] = {"url": url, "caBundle": bundle}
    return found


def _served(api: Api, path: str) -> bool:
    try:
        api.get(path)
    except ApiError as error:
        if error.status in (404, 429, 503):  # a real API server says that the storage is being initialised
            return False
        raise
    return True
