"""`mgpu scheduler` works against the playground's API server with real watches, HTTPS and a Lease."""

import base64
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

from mgpu.kube import Api, ApiError
from mgpu.model.device_object import write_device
from mgpu.model.pods import Node
from playground.apiserver import ApiServer, User, running
from scheduler.announcements import ANNOTATION
from tests import builders as b
from tests.mgpu.serving.process import Client, Server
from tests.mgpu.serving.reviews import patch_of, review
from tests.scheduler.test_main import KUBECONFIG
from tests.waiting import until

RUN = "from mgpu.cli.main import main; main()"
FORBIDDEN = """
from mgpu.kube import Api, ApiError
from scheduler import watches

def pages(self, path, _pages=Api.pages, **query):
    if "mtgpupods" in path:
        raise ApiError(403, "Forbidden", "mtgpupods is forbidden")
    return _pages(self, path, **query)

Api.pages = pages
watches._SILENT_SECONDS = 0.3
"""
PATIENT = """
from mgpu.serving import patience, server
from scheduler import runtime

patience.PATIENCE_SECONDS = runtime.WRITE_SECONDS = runtime._END_SECONDS = 600
server._DRAIN_SECONDS = 60
"""
SHORT_LEASE = """
from mgpu.kube import leader

leader.LEASE_SECONDS, leader._FENCE_SECONDS, leader._ROUND_SECONDS = 3, 2.0, 0.5
"""
STALLING = """
import os, time
from scheduler.decisions.decider import Decider

def decide(self, known, node, *, _decide=Decider.decide, **options):
    found = _decide(self, known, node, **options)
    if known.pod.name in ("p1", "p2"):
        open({folder!r} + "/decided-" + known.pod.name, "w").close()
        while not os.path.exists({folder!r} + "/go"):
            time.sleep(0.01)
    return found

Decider.decide = decide
"""
ROOT = Path(__file__).parents[2]
PODS = "/api/v1/namespaces/default/pods"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
CLOSE = {"Connection": "close"}
INDEX = "vke.volcengine.com/gpu-index-container-c"
REPLICAS = "/api/v1/namespaces/mgpu-system/pods"
LEADER = "/apis/coordination.k8s.io/v1/namespaces/mgpu-system/leases/mgpu-scheduler"


class Cluster:
    def __init__(self, folder: Path, api: Api) -> None:
        self.folder, self.api = folder, api
        self.schedulers: list[Server] = []

    def start(self, *options: str, first: str = "") -> Server:
        """first: code of the test's that runs before it."""
        files = ("--kubeconfig", str(self.folder / "kubeconfig"), "--self-signed-dir", str(self.folder / "certificate"))
        fixed = (*files, "--host", "127.0.0.1", "--port", "0")
        server = Server("-c", first + RUN, "scheduler", *fixed, "--extender-port", "0", *options, addresses=2)
        self.schedulers.append(server)
        return server

    def start_in_pod(self, name: str, *options: str) -> Server:
        labels = {"app.kubernetes.io/name": "mgpu", "app.kubernetes.io/component": "scheduler"}
        meta, spec = {"name": name, "labels": labels}, {"containers": [{"name": "c", "image": "mgpu"}]}
        pod = self.api.create(REPLICAS, {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        uid = pod["metadata"]["uid"]
        return self.start(*options, first=f"import os; os.environ['MGPU_SCHEDULER__PODUID'] = '{uid}'\n")

    def labelled(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.api.list(REPLICAS, labelSelector="mgpu.io/leads=true")[0]]

    def announced(self) -> bool:
        return ANNOTATION in self.api.get("/api/v1/nodes/n1")["metadata"].get("annotations", {})

    def request(self, server: Server, path: str, body: Any = None) -> tuple[int, bytes]:
        """The extender's side of a scheduler."""
        method = "POST" if body is not None else "GET"
        reply = urllib3.request(method, f"http://127.0.0.1:{server.ports[1]}{path}", json=body, headers=CLOSE)
        return reply.status, reply.data

    def decides(self, server: Server) -> None:
        until(lambda: self.request(server, "/leads")[0] == 200)

    def register(self, server: Server) -> None:
        """Install the webhook configuration for this process."""
        raw = yaml.safe_load((ROOT / "manifests/base/binding-webhook.yaml").read_text())
        url = f"https://127.0.0.1:{server.ports[0]}/bind-admission"
        bundle = base64.b64encode((self.folder / "certificate/ca.crt").read_bytes()).decode()
        raw["webhooks"][0] |= {"clientConfig": {"url": url, "caBundle": bundle}, "timeoutSeconds": 30}
        self.api.create(WEBHOOKS, raw)

    def submit(self, name: str, core: int = 60, node: str = "") -> dict[str, Any]:
        raw = b.share(name, core, node=node)
        del raw["metadata"]["uid"]
        return self.api.create(PODS, raw)

    def bind(self, name: str, path: str = "") -> None:
        body = {"metadata": {"name": name}, "target": {"kind": "Node", "name": "n1"}}
        self.api.create(path or f"{PODS}/{name}/binding", {"apiVersion": "v1", "kind": "Binding", **body})

    def card(self, name: str) -> str | None:
        return (self.api.get(f"{PODS}/{name}")["metadata"].get("annotations") or {}).get(INDEX)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """An API server with a node of two cards, and nothing that runs."""
    with running(ApiServer(tokens={"admin": User("kubernetes-admin", ("system:masters",))})) as url:
        (tmp_path / "kubeconfig").write_text(
            KUBECONFIG.replace("http://127.0.0.1:9", url).replace("token: t", "token: admin")
        )
        api = Api.connect(str(tmp_path / "kubeconfig"))
        made = Cluster(tmp_path, api)
        crd = yaml.safe_load((ROOT / "manifests/crds/device.yaml").read_text())
        api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        api.create("/api/v1/nodes", b.node("n1"))
        device = write_device(Node("n1"), "", b.cards(2))
        until(lambda: _created(api, "/apis/scheduling.koordinator.sh/v1alpha1/devices", device))
        try:
            yield made
        finally:
            for server in made.schedulers:
                server.close()
            api.close()


def _created(api: Api, path: str, body: dict[str, Any]) -> bool:
    try:
        api.create(path, body)
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True


def test_metrics_describe_the_cluster(cluster: Cluster) -> None:
    server = cluster.start_in_pod("scheduler", "--metrics-port", "0")
    port = int(server.wait_for(b"serving ").rpartition(b":")[2])
    cluster.decides(server)
    cluster.submit("forced", node="n1")
    assert until(lambda: cluster.card("forced")) == "0"
    wanted = {
        'mgpu_core_used_cards{model="A100-SXM4-80GB"} 0.6',
        'mgpu_late_decisions_total{result="decided"} 1.0',
        'mgpu_watch_synced{watch="pods"} 1.0',
        "mgpu_leader 1.0",
        "mgpu_ready 1.0",
        "mgpu_decides 1.0",
        "mgpu_labelled 1.0",
    }

    def shown() -> set[str]:
        return set(urllib3.request("GET", f"http://127.0.0.1:{port}/metrics", headers=CLOSE).data.decode().splitlines())

    until(lambda: wanted <= shown())


def test_restarted_process_continues_with_bindings_and_late_decisions(cluster: Cluster) -> None:
    server = cluster.start()
    cluster.register(server)
    cluster.decides(server)

    cluster.submit("plain")
    cluster.bind("plain")
    assert cluster.card("plain") == "0"

    cluster.submit("other", core=20)
    cluster.bind("other", path="/api/v1/namespaces/default/bindings")
    assert cluster.card("other") == "0"

    cluster.submit("forced", node="n1")
    assert until(lambda: cluster.card("forced")) == "1"

    cluster.submit("too-much")
    with pytest.raises(ApiError, match="2 cards: 1 core 20 percent short, 1 core 40 percent short") as refused:
        cluster.bind("too-much")
    assert refused.value.status == 409

    cluster.submit("nowhere", node="n1")
    status = until(lambda: _failed(cluster.api, "nowhere"))
    assert status["reason"] == "MgpuNoCards"
    until(lambda: any(e["reason"] == "MgpuNoCards" for e in cluster.api.list("/api/v1/events")[0]))

    server.terminate()
    assert server.join() == 0
    assert cluster.api.get(LEADER)["spec"]["holderIdentity"] == ""
    cluster.submit("meanwhile", core=20, node="n1")
    again = cluster.start()
    cluster.decides(again)
    assert until(lambda: cluster.card("meanwhile")) in ("0", "1")
    pod = cluster.submit("last", core=60)
    found = cluster.request(again, "/filter", {"Pod": pod, "NodeNames": ["n1"]})
    assert b'"NodeNames":[]' in found[1]


def _failed(api: Api, name: str) -> dict[str, Any] | None:
    status: dict[str, Any] = api.get(f"{PODS}/{name}")["status"]
    return status if status["phase"] == "Failed" else None


def test_process_without_right_to_mtgpupods_decides_for_other_pods(cluster: Cluster) -> None:
    server = cluster.start(first=FORBIDDEN)
    cluster.decides(server)
    cluster.register(server)
    cluster.submit("p")
    cluster.bind("p")
    assert cluster.card("p") == "0"


def test_follower_takes_over_when_the_leader_ends(cluster: Cluster) -> None:
    first = cluster.start_in_pod("first")
    cluster.decides(first)
    until(lambda: cluster.labelled() == ["first"])
    second = cluster.start_in_pod("second")
    until(lambda: b"another replica leads" in cluster.request(second, "/leads")[1])
    assert {cluster.request(second, probe)[0] for probe in ("/healthz", "/readyz")} == {200}
    assert cluster.request(second, "/leads")[0] == 503
    pod = cluster.submit("p")
    status, answer = cluster.request(second, "/filter", {"Pod": pod, "NodeNames": ["n1"]})
    assert (status, b"another replica leads" in answer) == (503, True)
    until(cluster.announced)
    cluster.api.patch("/api/v1/nodes/n1", {"metadata": {"annotations": {ANNOTATION: None}}})
    first.terminate()
    cluster.decides(second)
    until(cluster.announced)  # cards that came free without a leader have not been announced
    until(lambda: cluster.labelled() == ["second"])
    cluster.submit("forced", node="n1")
    assert until(lambda: cluster.card("forced")) == "0"


def test_ending_leader_releases_its_lease_before_draining(cluster: Cluster) -> None:
    first = cluster.start(first=PATIENT)
    cluster.decides(first)
    second = cluster.start()
    until(lambda: b"another replica leads" in cluster.request(second, "/leads")[1])
    with Client(first.ports[1]) as client:
        client.wire.sendall(b"GET /readyz HTTP/1.1\r\n")
        first.terminate()
        cluster.decides(second)
        client.wire.sendall(b"Host: x\r\n\r\n")
        assert client.receive()[0] == 200


def test_decisions_of_ending_leader_are_written_before_the_next_leads(cluster: Cluster, tmp_path: Path) -> None:
    server = cluster.start("--self-signed-dir", str(tmp_path / "tls"), first=PATIENT)
    cluster.decides(server)
    until(lambda: (tmp_path / "tls" / "ca.crt").exists())
    binding = {"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n1"}}
    asked = review(binding, kind={"group": "", "version": "v1", "kind": "Binding"}, subresource="binding")
    cluster.submit("p")
    with Client(server.ports[0], tmp_path / "tls" / "ca.crt") as api_server:
        status, answer = api_server.request(asked, "/bind-admission")
        (meta,) = (row["value"] for row in patch_of(answer) if row["path"].endswith("annotations"))
        server.terminate()
        until(lambda: b"this replica is being stopped" in cluster.request(server, "/leads")[1])
        status, answer = api_server.request(asked, "/bind-admission")
        assert (status, answer) == (503, {"error": "this replica is being stopped"})
    assert cluster.api.get(LEADER)["spec"]["holderIdentity"]
    cluster.api.create(f"{PODS}/p/binding", {**binding, "metadata": {"name": "p", "annotations": meta}})
    until(lambda: not cluster.api.get(LEADER)["spec"]["holderIdentity"])
    assert cluster.card("p") == "0"
    assert server.join() == 0


def signalled(server: Server, number: signal.Signals) -> None:
    """To gunicorn and its worker."""
    pid = server.process.pid
    for each in (pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())):
        os.kill(each, number)


def test_suspended_leader_writes_nothing_for_requests_in_progress(cluster: Cluster, tmp_path: Path) -> None:
    """A paused process goes on after its lease has run out, with decisions that are of before."""
    ca = tmp_path / "tls" / "ca.crt"
    stalls = SHORT_LEASE + STALLING.format(folder=str(tmp_path))
    first = cluster.start("--self-signed-dir", str(tmp_path / "tls"), first=stalls)
    cluster.decides(first)
    until(ca.exists)
    second = cluster.start(first=SHORT_LEASE)
    until(lambda: b"another replica leads" in cluster.request(second, "/leads")[1])
    binding = {"metadata": {"name": "p1"}, "target": {"kind": "Node", "name": "n1"}}
    asked = review(binding, kind={"group": "", "version": "v1", "kind": "Binding"}, subresource="binding")
    asked["request"]["name"] = "p1"
    cluster.submit("p1", core=30)
    uid = cluster.submit("p2", core=30)["metadata"]["uid"]
    bind = f"http://127.0.0.1:{first.ports[1]}/bind"
    extended = {"PodName": "p2", "PodNamespace": "default", "PodUID": uid, "Node": "n1"}
    with ThreadPoolExecutor(2) as pool, Client(first.ports[0], ca) as api_server:
        admitted = pool.submit(api_server.request, asked, "/bind-admission")
        bound = pool.submit(urllib3.request, "POST", bind, json=extended, headers=CLOSE, timeout=60)
        for name in ("p1", "p2"):
            until((tmp_path / f"decided-{name}").exists)
        signalled(first, signal.SIGSTOP)
        try:
            cluster.decides(second)
            cluster.submit("q", core=80, node="n1")
            assert until(lambda: cluster.card("q")) == "0"
            (tmp_path / "go").touch()
        finally:
            signalled(first, signal.SIGCONT)
        assert admitted.result(30) == (503, {"error": "another replica leads"})
        assert bound.result(30).data == b'{"Error":""}\n'
    # The first one had decided card 0. It bound the pod without a record, as any replica does that does not lead.
    assert until(lambda: cluster.card("p2")) == "1"


def test_each_app_is_served_only_on_its_address(cluster: Cluster, tmp_path: Path) -> None:
    server = cluster.start("--no-leader-elect", "--self-signed-dir", str(tmp_path / "tls"))
    cluster.decides(server)
    assert cluster.request(server, "/bind-admission", {})[0] == 404
    with Client(server.ports[0], tmp_path / "tls" / "ca.crt") as https:
        https.send(b"{}", "/bind")
        assert https.receive()[0] == 404


def test_process_without_api_server_is_not_ready_and_retries(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    server = cluster.start()
    status, text = cluster.request(server, "/readyz")
    assert status == 503
    assert b"not in sync yet" in text
    assert cluster.request(server, "/healthz")[0] == 200
    assert cluster.request(server, "/filter", {"Pod": b.share("p"), "NodeNames": []})[0] == 503


def test_learned_policy_scores_nodes_and_chooses_cards(cluster: Cluster) -> None:
    """Pods requested whole cards before, so a share goes to the card with the other share."""
    cluster.api.create("/api/v1/nodes", b.node("n2"))
    cluster.api.create(
        "/apis/scheduling.koordinator.sh/v1alpha1/devices", write_device(Node("n2"), "", b.cards(2, node="n2"))
    )
    for i in range(8):
        whole = b.pod(f"whole-{i}", b.container(core=100))
        del whole["metadata"]["uid"]
        cluster.api.create(PODS, whole)
    record = {"vke.volcengine.com/assumed": "true", INDEX: "1"}
    there = b.share("there", 50, annotations=record, node="n1")
    del there["metadata"]["uid"]
    cluster.api.create(PODS, there)
    new = cluster.submit("new", core=50)

    server = cluster.start("--node-policy", "fragmentation", "--card-policy", "fragmentation")
    cluster.register(server)
    cluster.decides(server)
    status, answer = cluster.request(server, "/prioritize", {"Pod": new, "NodeNames": ["n2", "n1"]})
    assert (status, json.loads(answer)) == (200, [{"Host": "n2", "Score": 0}, {"Host": "n1", "Score": 10}])
    cluster.bind("new")
    assert cluster.card("new") == "1"


def test_waiting_pod_gets_partitions_and_configmap(cluster: Cluster) -> None:
    """Also where the process that wrote the plan has gone."""
    maps, labels = "/api/v1/namespaces/mgpu-system/configmaps", {"gpu.partitioning": "mps"}
    cluster.api.patch("/api/v1/nodes/n1", {"metadata": {"labels": labels}})
    amounts = {"nvidia.com/gpu-4gb": "1"}
    raw = b.pod("sliced", {"name": "c", "image": "cuda", "resources": {"requests": amounts, "limits": amounts}})
    del raw["metadata"]["uid"]
    pod = cluster.api.create(PODS, raw)
    server = cluster.start()
    cluster.decides(server)
    answer = json.loads(cluster.request(server, "/filter", {"Pod": pod, "NodeNames": ["n1"]})[1])
    assert answer["FailedNodes"] == {"n1": "the node's cards are to be repartitioned for the pod"}
    until(lambda: _data(cluster.api, maps).get("n1"))
    said = cluster.api.get("/api/v1/nodes/n1")["metadata"]["annotations"]
    assert json.loads(said["dynamicgpuslice"])["spec-gpu-0-4gb"] >= 1
    cluster.api.delete(f"{maps}/mps-configmap")
    until(lambda: _data(cluster.api, maps).get("n1"))
    server.terminate()
    assert server.join() == 0
    cluster.api.delete(f"{maps}/mps-configmap")
    cluster.decides(cluster.start())
    until(lambda: _data(cluster.api, maps).get("n1"))


def _data(api: Api, maps: str) -> dict[str, str]:
    return next((dict(item["data"]) for item in api.list(maps)[0]), {})
