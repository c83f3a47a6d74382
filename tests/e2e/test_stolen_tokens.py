"""What a stolen token of a process cannot do: the attacks by which one became a cluster administrator."""

from collections.abc import Iterator
from typing import Any

import pytest

from mgpu.kube import Api, ApiError
from mgpu.kube.client import JSON_PATCH
from playground.cluster import Cluster

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
SECRETS = "/api/v1/namespaces/mgpu-system/secrets"
ATTACKERS_SERVER = [{"op": "replace", "path": "/webhooks/0/clientConfig/url", "value": "https://198.51.100.1/"}]
EVERYBODY = pytest.mark.parametrize("account", ["webhook", "scheduler", "deviceplugin"])


@pytest.fixture(scope="module")
def cluster(attacked: Cluster) -> Iterator[Cluster]:
    names = ("mgpu-webhook-tls", "mgpu-scheduler-tls", "somebodys")
    for name in names:
        attacked.api.create(SECRETS, {"metadata": {"name": name}, "data": {"k": "dg=="}})
    yield attacked
    for name in names:
        attacked.api.delete(f"{SECRETS}/{name}")


def forbidden(call: Any) -> None:
    with pytest.raises(ApiError) as refused:
        call()
    assert refused.value.status == 403, refused.value


@EVERYBODY
@pytest.mark.parametrize(
    "path",
    [
        "mutatingwebhookconfigurations/mgpu-webhook",
        "mutatingwebhookconfigurations/mgpu-scheduler",
        "validatingwebhookconfigurations/mgpu-webhook",
    ],
)
def test_a_stolen_token_neither_reads_nor_redirects_a_webhook_configuration(stolen: Api, path: str) -> None:
    forbidden(lambda: stolen.get(f"{ADMISSION}/{path}"))
    forbidden(lambda: stolen.patch(f"{ADMISSION}/{path}", ATTACKERS_SERVER, JSON_PATCH))
    forbidden(lambda: stolen.delete(f"{ADMISSION}/{path}"))


@EVERYBODY
def test_a_stolen_token_makes_no_token_secret(stolen: Api) -> None:
    """Kubernetes puts a token of any service account of the namespace into a Secret of this type."""
    annotations = {"kubernetes.io/service-account.name": "mgpu-scheduler"}
    token = {
        "metadata": {"name": "token", "annotations": annotations},
        "type": "kubernetes.io/service-account-token",
    }
    forbidden(lambda: stolen.create(SECRETS, token))
    forbidden(lambda: stolen.create("/api/v1/namespaces/kube-system/secrets", token))


@EVERYBODY
def test_a_stolen_token_reads_no_secret_but_its_own(stolen: Api, account: str) -> None:
    forbidden(lambda: stolen.get(SECRETS))
    forbidden(lambda: stolen.get("/api/v1/secrets"))
    for name in ("mgpu-webhook-tls", "mgpu-scheduler-tls", "somebodys"):
        if name == f"mgpu-{account}-tls":
            assert stolen.get(f"{SECRETS}/{name}")["data"]
            forbidden(lambda name=name: stolen.delete(f"{SECRETS}/{name}"))
        else:
            forbidden(lambda name=name: stolen.get(f"{SECRETS}/{name}"))


@EVERYBODY
def test_a_stolen_token_gives_itself_no_rights(stolen: Api, account: str) -> None:
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    user = {"kind": "ServiceAccount", "name": f"mgpu-{account}", "namespace": "mgpu-system"}
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    body = {"metadata": {"name": "mine"}, "roleRef": ref, "subjects": [user]}
    forbidden(lambda: stolen.create(f"{rbac}/clusterrolebindings", body))
    forbidden(lambda: stolen.create(f"{rbac}/namespaces/mgpu-system/rolebindings", body))
    forbidden(lambda: stolen.create(f"/api/v1/namespaces/mgpu-system/serviceaccounts/mgpu-{account}/token", {}))
