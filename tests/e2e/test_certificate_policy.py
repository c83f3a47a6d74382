"""manifests/base/certificate-policy.yaml on a real API server: a process renews its certificate, and nothing else."""

import base64
import copy
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime

import pytest
import yaml

from mgpu.kube import Api, ApiError
from mgpu.kube.secrets import SecretStore
from mgpu.serving.certificates import CA, CA_KEY, CHAIN, KEY, Authority, create_authority, ensure_certificate
from playground.cluster import Cluster
from playground.installation import MANIFESTS
from playground.nodes import make_nodes
from tests.e2e.bench import Json
from tests.waiting import until

SECRETS = "/api/v1/namespaces/mgpu-system/secrets"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
ACCOUNTS = pytest.mark.parametrize("account", ["webhook", "scheduler"])
pytestmark = pytest.mark.skipif(
    not os.environ.get("KUBEBUILDER_ASSETS"),
    reason="KUBEBUILDER_ASSETS is not set: ours has no ValidatingAdmissionPolicies",
)


def encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in files.items()}


def other_authority(raw: Json) -> None:
    raw["data"] |= encoded(create_authority(datetime.now(UTC)))


def orphaned(raw: Json) -> None:
    raw["metadata"]["ownerReferences"] = [{"apiVersion": "v1", "kind": "Node", "name": "gone", "uid": "u"}]


CHANGES: dict[str, Callable[[Json], None]] = {
    "another CA": other_authority,
    "no CA": lambda raw: raw["data"].pop(CA),
    "another file": lambda raw: raw["data"].update(encoded({"more": b"x"})),
    "an owner": orphaned,
    "a finalizer": lambda raw: raw["metadata"].update(finalizers=["example.com/a"]),
    "a replicator's annotation": lambda raw: raw["metadata"].update(
        annotations={"reflector.v1.k8s.emberstack.com/reflects": "mgpu-system/mgpu-record-key"}
    ),
    "a label": lambda raw: raw["metadata"].update(labels={"app": "a"}),
    "a key that takes long to read": lambda raw: raw["data"].update(encoded({KEY: 100_000 * b"x"})),
    "a chain that takes long to read": lambda raw: raw["data"].update(encoded({CHAIN: 100_000 * b"x"})),
    "immutable": lambda raw: raw.update(immutable=True),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(make_nodes(1, 1)) as made:
        for policy in yaml.safe_load_all((MANIFESTS / "base/certificate-policy.yaml").read_text()):
            plural = "policies" if policy["kind"].endswith("Policy") else "policybindings"
            made.api.create(f"{ADMISSION}/validatingadmission{plural}", policy)
        for name in ("mgpu-webhook-tls", "mgpu-scheduler-tls"):
            meta = {"name": name, "labels": {"app.kubernetes.io/part-of": "mgpu"}, "annotations": {"a": "b"}}
            data = encoded({**create_authority(datetime.now(UTC)), "tls.crt": b"", "tls.key": b""})
            made.api.create(SECRETS, {"metadata": meta, "data": data, "type": "kubernetes.io/tls"})
        api = made.connect("webhook")
        until(lambda: refused(api, "mgpu-webhook-tls", orphaned))
        api.close()
        yield made


def refused(api: Api, name: str, change: Callable[[Json], object]) -> bool:
    raw = copy.deepcopy(api.get(f"{SECRETS}/{name}"))
    change(raw)
    try:
        api.replace(f"{SECRETS}/{name}", raw, dryRun="All")
    except ApiError as error:
        if "ValidatingAdmissionPolicy" not in error.message:
            raise
        return True
    return False


@ACCOUNTS
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_stolen_token_changes_no_more_than_the_leaf_of_its_secret(
    stolen: Api, account: str, change: Callable[[Json], object]
) -> None:
    assert refused(stolen, f"mgpu-{account}-tls", change)


@ACCOUNTS
def test_a_process_renews_its_certificate_and_leaves_the_rest(stolen: Api, account: str) -> None:
    path = f"{SECRETS}/mgpu-{account}-tls"
    before = stolen.get(path)
    files = ensure_certificate(
        SecretStore(stolen, "mgpu-system", f"mgpu-{account}-tls"), {"a"}, datetime.now(UTC), Authority.GIVEN
    )
    after = stolen.get(path)
    assert files["tls.crt"]
    assert after["data"]["tls.crt"] != before["data"]["tls.crt"]
    assert {name: after["data"][name] for name in (CA, CA_KEY)} == {name: before["data"][name] for name in (CA, CA_KEY)}
    kept = ("labels", "annotations", "uid")
    assert {key: after["metadata"][key] for key in kept} == {key: before["metadata"][key] for key in kept}
