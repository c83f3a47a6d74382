"""Installs mgpu on the API server of a `playground.cluster`: the manifests, certificate authorities and record keys.

Record keys sign and verify the seals of allocation records. `playground.cluster`, `bench.hostile` and the tests call
this module. If a manifest of a new kind must be installed, add the kind to `_COLLECTIONS`.
"""

import base64
import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonpatch
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from mgpu.kube import Api, ApiError
from mgpu.model.record_seals import key_id
from mgpu.serving.certificates import create_authority
from mgpu.serving.record_keys import SINCE
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
    "DeviceClass": "/apis/resource.k8s.io/v1/deviceclasses",
    "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
    "MutatingWebhookConfiguration": "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
}
_SERVED_SECONDS = 60.0


def authorities(folder: Path) -> dict[str, Path]:
    """Create a CA for each of mgpu's Services, as manifests/certificates.sh does.

    Return the folder of each CA, by the name of the Service.
    """
    made = {}
    for service in ("mgpu-webhook", "mgpu-scheduler"):
        made[service] = folder / service
        made[service].mkdir(mode=0o700)
        for name, content in create_authority(datetime.now(UTC)).items():
            (made[service] / name).write_bytes(content)
    return made


def install(api: Api, ports: Mapping[str, int], bundles: Mapping[str, bytes], components: Collection[str] = ()) -> None:
    """Create the objects of `manifests` and wait until the CRDs are served.

    Args:
        ports: The port on 127.0.0.1 at which the webhooks of each Service are served.
        bundles: The CA certificate of each Service, for the webhook configurations.
        components: The names of the components that are installed beside the base.

    Raises:
        ApiError: The API server refuses a request.
        StartError: The folder of the manifests is missing, or a CRD is not served within 60 seconds.
    """
    found = list(manifests(components=components))
    if not found:
        raise StartError(f"no manifests in {MANIFESTS}: run the playground from a checkout of the project")
    for manifest in found:
        collection = _COLLECTIONS[manifest["kind"]].format(namespace=manifest["metadata"].get("namespace", ""))
        api.create(collection, located(manifest, ports, bundles))
    for manifest in found:
        if manifest["kind"] == "CustomResourceDefinition":
            spec = manifest["spec"]
            path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
            until(f"{path} is served", lambda path=path: _served(api, path), _SERVED_SECONDS)  # type: ignore[misc]


def manifests(folder: Path = MANIFESTS, components: Collection[str] = ()) -> Iterator[Json]:
    """Yield the manifests whose kinds are in `_COLLECTIONS`, such as CRDs and roles, in a fixed order.

    Manifests of other kinds are skipped. Some of them, such as Deployments, need a cluster that runs containers.

    Args:
        components: The names of components whose manifests and JSON patches are added to the base.
    """
    parts = [folder / "components" / name for name in components]
    patches = [patch for part in parts for patch in _patches(part)]
    paths = sorted([*folder.glob("crds/*.yaml"), *folder.glob("base/*.yaml")])
    for path in [*paths, *(part / name for part in parts for name in _kustomization(part)["resources"])]:
        for document in yaml.load_all(path.read_text(), yaml.CSafeLoader):
            if document and document.get("kind") in _COLLECTIONS:
                yield _patched(document, patches)


def _kustomization(component: Path) -> Json:
    found: Json = yaml.load((component / "kustomization.yaml").read_text(), yaml.CSafeLoader)
    return found


def _patches(component: Path) -> Iterator[tuple[Json, list[Json]]]:
    """Yield the target and the operations of each JSON patch of a component."""
    for row in _kustomization(component).get("patches", ()):
        if "target" in row:
            text = row["patch"] if "patch" in row else (component / row["path"]).read_text()
            yield row["target"], yaml.load(text, yaml.CSafeLoader)


def _patched(manifest: Json, patches: Iterable[tuple[Json, list[Json]]]) -> Json:
    for target, operations in patches:
        if (target["kind"], target["name"]) == (manifest["kind"], manifest["metadata"]["name"]):
            manifest = jsonpatch.apply_patch(manifest, operations)
    return manifest


def located(manifest: Json, ports: Mapping[str, int], bundles: Mapping[str, bytes]) -> Json:
    """Return a copy of the manifest. Its webhooks have URLs on 127.0.0.1 and CA bundles in place of Services."""
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
        if error.status in (404, 429, 503):  # kube-apiserver answers with these while it initializes the storage
            return False
        raise
    return True


def record_keys(folder: Path) -> dict[str, str]:
    """Create a key pair for seals in the new `folder`. Return the environment variables that configure the keys."""
    public = folder / "public"
    public.mkdir(parents=True)
    key = Ed25519PrivateKey.generate()
    signing = folder / "signing.pem"
    signing.touch(mode=0o600)
    signing.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (public / f"{key_id(key.public_key())}.pem").write_bytes(pem)
    (public / SINCE).write_text(datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    return {"MGPU_RECORDS__SIGNINGKEY": str(signing), "MGPU_RECORDS__PUBLICKEYS": str(public)}


def config_map(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the ConfigMap from which `mgpu doctor` reads the public keys.

    Args:
        variables: The result of `record_keys`.
    """
    folder = Path(variables["MGPU_RECORDS__PUBLICKEYS"])
    data = {file.name: file.read_text() for file in sorted(folder.iterdir())}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mgpu-record-keys"}, "data": data}
