"""Tests that the admission endpoints of the real processes answer calls of their API server alone.

In the attack a pod that reaches port 8443 or 8444 posts an AdmissionReview in the name of system:kube-scheduler.
"""

import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mgpu.kube import ApiError
from playground.cluster import Cluster
from tests import builders as b
from tests.manifests.conftest import runner
from tests.manifests.rendered import MANIFESTS
from tests.mgpu.serving.process import Client
from tests.mgpu.serving.reviews import review
from tests.waiting import until

PODS = "/api/v1/namespaces/default/pods"
STRANGER = "127.0.0.6"


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose processes reject the calls of their API server."""
    config = tmp_path_factory.mktemp("closed") / "mgpu.yaml"
    config.write_text("webhook: {apiServers: [192.0.2.1]}\nscheduler: {apiServers: [192.0.2.1]}\n")
    with Cluster([], config=config) as cluster:
        yield cluster


def port_of(cluster: Cluster, configuration: str) -> int:
    path = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{configuration}"
    url = cluster.api.get(path)["webhooks"][0]["clientConfig"]["url"]
    return int(url.rpartition(":")[2].partition("/")[0])


def post(cluster: Cluster, service: str, path: str, body: Any, source: str) -> tuple[int, bytes]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with Client(port_of(cluster, service), context=context, source=source) as client:
        client.send(json.dumps(body).encode(), path)
        status, _, text = client.receive()
        return status, text


def without_uid(raw: dict[str, Any]) -> dict[str, Any]:
    return {**raw, "metadata": {k: v for k, v in raw["metadata"].items() if k != "uid"}}


@pytest.mark.usefixtures("bench")
def test_review_from_another_address_than_the_api_servers_reserves_no_cards(cluster: Cluster) -> None:
    raw = without_uid(b.share("victim", 90))
    raw["spec"]["schedulerName"] = "somebody-else"  # the pod stays unbound
    pod = cluster.api.create(PODS, raw)
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "victim", "namespace": "default", "uid": pod["metadata"]["uid"]},
        "target": {"kind": "Node", "name": cluster.nodes[0].name},
    }
    resource = {"group": "", "version": "v1", "resource": "pods"}
    kind = {"group": "", "version": "v1", "kind": "Binding"}
    who = {"user": "system:kube-scheduler", "name": "victim", "subresource": "binding"}
    asked = review(binding, kind=kind, resource=resource, **who)
    status, text = post(cluster, "mgpu-scheduler", "/bind-admission", asked, STRANGER)
    assert status == 403
    assert f"calls from {STRANGER}: the setting scheduler.apiServers" in text.decode()
    assert post(cluster, "mgpu-scheduler", "/bind-admission", asked, "127.0.0.1")[0] == 200
    # A reservation for a pod that is deleted before it is bound would last for 30 s on the shared cluster.
    cluster.api.create(f"{PODS}/victim/binding", binding)


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
def test_webhook_called_from_another_address_than_the_api_servers_answers_403(cluster: Cluster, path: str) -> None:
    asked = review(b.share("p", 100))
    assert post(cluster, "mgpu-webhook", path, asked, STRANGER)[0] == 403
    assert post(cluster, "mgpu-webhook", path, asked, "127.0.0.1")[0] == 200


def test_webhook_that_rejects_the_api_server_names_the_address_and_the_setting_to_users(closed: Cluster) -> None:
    with pytest.raises(ApiError) as refused:
        closed.api.create(PODS, without_uid(b.share("p", 50)))
    assert "failed calling webhook" in refused.value.message
    assert "does not accept calls from 127.0.0.1: the setting webhook.apiServers" in refused.value.message


def checked(cluster: Cluster, home: Path) -> "subprocess.CompletedProcess[str]":
    """Run the check that `deploy.sh` makes at its end."""
    return runner(cluster.kubeconfig, home)(MANIFESTS / "check.sh", env={"TRIES": "2", "API_SERVERS": "192.0.2.1"})


def test_check_api_server_is_let_in_passes(cluster: Cluster, tmp_path: Path) -> None:
    until(lambda: checked(cluster, tmp_path).returncode == 0)


def test_check_api_server_is_refused_names_its_address_and_the_command(closed: Cluster, tmp_path: Path) -> None:
    done = checked(closed, tmp_path)
    assert done.returncode == 1
    assert "mgpu refuses the API server, whose calls come from 127.0.0.1" in done.stderr
    assert "API_SERVERS=192.0.2.1,127.0.0.1 make deploy" in done.stderr
