"""`mgpu doctor`: silent on an installation that is well, and names each thing that is wrong, and nothing else."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mgpu.cli.main import main
from mgpu.kube import Api, ApiError
from mgpu.kube.leader import Leader
from mgpu.serving.callers import Callers
from mgpu.serving.certificates import CA, Files
from mgpu.version import VERSION_LABEL, Toolkit
from playground.apiserver import ApiServer, User, running, self_signed, write_kubeconfig
from playground.processes import free_port
from tests.builders import share
from tests.mgpu.cli.installation import (
    APPS,
    COLLECTIONS,
    LEASES,
    MUTATING,
    NODES,
    PODS,
    SYSTEM,
    VALIDATING,
    Installation,
    certificate,
    keep_in_secret,
    trust,
    webhook,
)

RECORD = "vke.volcengine.com/gpu-index-container-c"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CHECKS = [
    "settings",
    "custom resources",
    "webhook",
    "certificates",
    "ca bundles",
    "callers",
    "records",
    "scheduler",
    "bindings",
    "cards",
    "agents",
    "node resources",
    "cdi",
    "nvidia plugin",
    "versions",
]


class World:
    """kubeconfig: an administrator's. files: what the webhook serves."""

    def __init__(self, folder: Path, files: Files, stack: ExitStack) -> None:
        self.folder, self.files, self._stack = folder, files, stack
        tls = self_signed(folder)
        users = {"admin": User("admin", ("system:masters",))}
        url = stack.enter_context(running(ApiServer(tokens=users), tls=tls))
        self.kubeconfig = str(folder / "kubeconfig")
        write_kubeconfig(folder / "kubeconfig", url, Path(tls[0]).read_bytes(), "admin")
        self.api = Api.connect(self.kubeconfig)
        stack.callback(self.api.close)
        self.installed = Installation(self.api)

    def serve(self, files: Files, name: str, callers: Callers | None = None) -> int:
        return self._stack.enter_context(webhook(files, self.folder / name, self.api, callers))

    def lead_to(self, port: int, name: str = "mgpu-webhook") -> None:
        for kind in (MUTATING, VALIDATING) if name == "mgpu-webhook" else (MUTATING,):
            path = f"{COLLECTIONS}/{kind}/{name}"
            found = self.api.get(path)
            url = found["webhooks"][0]["clientConfig"]["url"]
            found["webhooks"][0]["clientConfig"]["url"] = f"https://127.0.0.1:{port}/{url.rpartition('/')[2]}"
            self.api.replace(path, found)

    def doctor(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, ["doctor", "--kubeconfig", self.kubeconfig, *arguments])

    def findings(self, *arguments: str) -> list[tuple[str, str, str]]:
        result = self.doctor("-o", "json", *arguments)
        answer = json.loads(result.stdout)
        assert (result.exit_code == 0) == answer["ok"], result.output
        assert all((row["remedy"] == "") == (row["status"] == "ok") for row in answer["checks"]), result.output
        return [(row["status"], row["check"], row["message"]) for row in answer["checks"]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def world(tmp_path: Path, files: Files) -> Iterator[World]:
    with ExitStack() as stack:
        found = World(tmp_path, files, stack)
        found.installed.install(files, found.serve(files, "served"))
        yield found


def test_an_installation_that_is_well(world: World) -> None:
    findings = world.findings()
    assert [status for status, _, _ in findings] == ["ok"] * len(CHECKS), findings
    assert [check for _, check, _ in findings] == CHECKS


def unreachable(world: World) -> None:
    world.lead_to(free_port())


def refuses_the_api_server(world: World) -> None:
    world.lead_to(world.serve(world.files, "door", callers=Callers("webhook.apiServers", ())))


def expired(world: World) -> None:
    old = certificate(world.folder / "old", days_old=100)
    world.installed.trust(old)
    world.lead_to(world.serve(old, "served-old"))


def expired_and_the_secrets_are_hidden(world: World) -> None:
    expired(world)
    no_secrets(world)


def no_secrets(world: World) -> None:
    for name in ("mgpu-webhook-tls", "mgpu-scheduler-tls"):
        world.api.delete(f"/api/v1/namespaces/{SYSTEM}/secrets/{name}")


def stale_bundle(world: World) -> None:
    other = certificate(world.folder / "other")[CA]
    trust(world.api, MUTATING, "mgpu-webhook", other)
    trust(world.api, MUTATING, "0-mgpu-webhook", other)
    trust(world.api, VALIDATING, "mgpu-webhook", other)


def stale_bundle_and_the_secrets_are_hidden(world: World) -> None:
    stale_bundle(world)
    no_secrets(world)


def stale_bundle_of_bindings(world: World) -> None:
    trust(world.api, MUTATING, "mgpu-scheduler", certificate(world.folder / "other")[CA])


def stale_bundle_of_bindings_and_the_secrets_are_hidden(world: World) -> None:
    stale_bundle_of_bindings(world)
    no_secrets(world)


def bindings_unreachable(world: World) -> None:
    world.lead_to(free_port(), "mgpu-scheduler")


def bindings_not_asked(world: World) -> None:
    path = f"{COLLECTIONS}/{MUTATING}/mgpu-scheduler"
    found = world.api.get(path)
    found["webhooks"][0]["rules"][0]["resources"] = ["pods"]
    world.api.replace(path, found)


def somebody_else_decides(world: World) -> None:
    """By accounts of its own, and past our admission: both records name card 1."""
    for pod in ("ours", "theirs"):
        bound(world, pod, {RECORD: "1", "vke.volcengine.com/assumed": "true"})


def bound(world: World, name: str, record: dict[str, str]) -> None:
    """In the suite's own namespace, of which no webhook is asked."""
    raw = share(name, 60, node="n2", annotations=record)
    raw["metadata"]["namespace"] = SYSTEM
    world.api.create(PODS, raw)


def no_crd(world: World) -> None:
    world.api.delete(f"{DEFINITIONS}/devices.scheduling.koordinator.sh")


def no_agent(world: World) -> None:
    world.api.delete(f"{PODS}/mgpu-deviceplugin-n2", {"gracePeriodSeconds": 0})


def agent_not_ready(world: World) -> None:
    path = f"{PODS}/mgpu-deviceplugin-n2"
    world.api.delete(path, {"gracePeriodSeconds": 0})
    world.installed.pod("mgpu-deviceplugin-n2", "deviceplugin", "n2", ready=False)


def no_resources(world: World) -> None:
    found = world.api.get(f"{NODES}/n2")
    for key in ("capacity", "allocatable"):
        del found["status"][key]["vke.volcengine.com/mgpu-core"]
    world.api.replace(f"{NODES}/n2/status", found)


def no_longer_offered(world: World) -> None:
    """As the kubelet has it when an agent's socket is gone."""
    amounts = {"vke.volcengine.com/mgpu-core": "0"}
    world.api.patch(f"{NODES}/n2/status", {"status": {"allocatable": amounts}})


def led_twice(world: World) -> None:
    world.api.create("/api/v1/namespaces", {"metadata": {"name": "other"}})
    Leader(world.api, "other", "mgpu-scheduler", "x").round()


def answered_twice(world: World) -> None:
    found = world.api.get(f"{COLLECTIONS}/{MUTATING}/mgpu-scheduler")
    world.api.create(f"{COLLECTIONS}/{MUTATING}", {**found, "metadata": {"name": "mgpu-scheduler-2"}})


def not_elected(world: World) -> None:
    world.api.delete(f"{APPS}/deployments/mgpu-scheduler")
    world.installed.workload("deployments", "Deployment", "mgpu-scheduler", 2, "scheduler", "--no-leader-elect")


def not_elected_in_a_sidecar(world: World) -> None:
    not_elected(world)
    path = f"{APPS}/deployments/mgpu-scheduler"
    found = world.api.get(path)
    pod = found["spec"]["template"]["spec"]
    pod["initContainers"] = [{**pod["containers"][0], "restartPolicy": "Always"}]
    pod["containers"] = [{"name": "kube-scheduler", "image": "kube-scheduler"}]
    world.api.replace(path, found)


def led_to_a_follower_too(world: World) -> None:
    world.installed.leads("mgpu-scheduler-b")


def led_nowhere(world: World) -> None:
    world.installed.leads("mgpu-scheduler-a", None)


def led_nowhere_since_no_pod_knows_its_uid(world: World) -> None:
    led_nowhere(world)
    path = f"{APPS}/deployments/mgpu-scheduler"
    found = world.api.get(path)
    found["spec"]["template"]["spec"]["containers"][0]["env"] = []
    world.api.replace(path, found)


def no_cdi(world: World) -> None:
    world.installed.says("n1", cdi=False)


def stock_plugin(world: World, container: str = "nvidia-device-plugin-ctr") -> None:
    image = "nvidia/k8s-device-plugin:v0.17.0"
    world.installed.pod("nvidia-device-plugin-x", "", "n2", image=image, container=container)


def other_versions(world: World) -> None:
    world.installed.says("n2", version="0.0.9")


def another_webhook_version(world: World) -> None:
    labels = {VERSION_LABEL: "0.0.9"}
    world.api.patch(f"{APPS}/deployments/mgpu-webhook", {"spec": {"template": {"metadata": {"labels": labels}}}})


def nobody_leads(world: World) -> None:
    world.api.delete(f"{LEASES.format(SYSTEM)}/mgpu-scheduler")


def no_configuration(world: World) -> None:
    world.api.delete(f"{COLLECTIONS}/{VALIDATING}/mgpu-webhook")


FAULTS: dict[Callable[[World], None], tuple[str, str]] = {
    unreachable: ("webhook", "the API server does not reach the webhook"),
    refuses_the_api_server: ("webhook", "the webhook rejects the API server: "),
    expired: ("certificates", "the one in Secret mgpu-webhook-tls expired"),
    expired_and_the_secrets_are_hidden: ("certificates", "the webhook's certificate is not valid now"),
    stale_bundle: (
        "ca bundles",
        "mutate.mgpu.io: the CA bundle does not fit the certificate in Secret mgpu-webhook-tls",
    ),
    stale_bundle_and_the_secrets_are_hidden: ("ca bundles", "the API server does not trust the webhook's certificate"),
    stale_bundle_of_bindings: ("ca bundles", "bind.mgpu.io: the CA bundle does not fit"),
    stale_bundle_of_bindings_and_the_secrets_are_hidden: ("bindings", "Bindings do not reach mgpu"),
    bindings_unreachable: ("bindings", "Bindings do not reach mgpu"),
    bindings_not_asked: ("bindings", "Bindings do not reach mgpu"),
    somebody_else_decides: ("cards", "card 1 of n2 (120% and 2.0 GiB of it: mgpu-system/ours, mgpu-system/theirs)"),
    no_crd: ("custom resources", "the CRD of Device (scheduling.koordinator.sh/v1alpha1) is missing"),
    no_agent: ("agents", "no agent serves n2: DaemonSet mgpu-deviceplugin has no Pod there"),
    agent_not_ready: ("agents", "no agent serves n2: its Pod is not ready (Running)"),
    no_resources: ("node resources", "n2: no vke.volcengine.com/mgpu-core in its status"),
    no_longer_offered: ("node resources", "n2: no vke.volcengine.com/mgpu-core in its status"),
    led_twice: ("scheduler", "two schedulers decide: one leads in each of the namespaces mgpu-system, other"),
    answered_twice: ("scheduler", "two schedulers decide: mgpu-scheduler, mgpu-scheduler-2 both answer bindings"),
    not_elected: ("scheduler", "two schedulers decide: leader election is off, and there are 2 replicas"),
    not_elected_in_a_sidecar: ("scheduler", "two schedulers decide: leader election is off, and there are 2 replicas"),
    led_to_a_follower_too: ("scheduler", "the Service selects mgpu-scheduler-a, mgpu-scheduler-b: Bindings"),
    led_nowhere: ("scheduler", "the Service selects no Pod: none has the label mgpu.io/leads"),
    led_nowhere_since_no_pod_knows_its_uid: (
        "scheduler",
        "all Bindings are decided late; the Pods do not know their uid",
    ),
    nobody_leads: ("scheduler", "no scheduler decides: the Lease mgpu-scheduler is not renewed"),
    no_configuration: ("webhook", "there is no validatingwebhookconfiguration mgpu-webhook"),
    no_cdi: ("cdi", "CDI is off in the container runtime of n1"),
    stock_plugin: ("nvidia plugin", "it runs on n2, where mgpu serves nvidia.com/gpu too"),
    other_versions: ("versions", "parts have different versions: 0.0.9: agent of n2; 0.1.0: "),
    another_webhook_version: ("versions", "parts have different versions: 0.0.9: webhook; 0.1.0: "),
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_is_named_and_nothing_else(world: World, plant: Callable[[World], None]) -> None:
    plant(world)
    findings = world.findings()
    check, message = FAULTS[plant]
    odd = [row for row in findings if row[0] != "ok"]
    assert {(status, found) for status, found, _ in odd} == {("failed", check)}, odd
    assert any(message in row[2] for row in odd), odd


def test_what_is_not_known_is_no_fault(world: World) -> None:
    world.installed.says("n1", cdi=None)
    ((status, check, message),) = [row for row in world.findings() if row[0] != "ok"]
    assert (status, check) == ("warning", "cdi")
    assert "n1" in message


def test_cards_of_which_nobody_knows_who_holds_them_are_told(world: World) -> None:
    bound(world, "odd", {RECORD: "x"})
    ((status, check, message),) = [row for row in world.findings() if row[0] != "ok"]
    assert (status, check) == ("warning", "cards")
    assert "Pod mgpu-system/odd" in message


def test_one_without_a_lease_decides_where_it_answers(world: World) -> None:
    """As it is started by hand: nothing of it is to be seen in the API."""
    nobody_leads(world)
    world.api.delete(f"{APPS}/deployments/mgpu-scheduler")
    assert ("ok", "scheduler", "one scheduler found (leader election is off)") in world.findings()
    bindings_unreachable(world)
    assert "scheduler" not in [check for _, check, _ in world.findings()]


def test_the_namespace_of_the_suite_is_no_place_to_try(world: World) -> None:
    result = world.doctor("--try-in", SYSTEM)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--try-in: must be another namespace" in result.stderr


def test_a_namespace_that_is_not_there(world: World) -> None:
    odd = [row for row in world.findings("--try-in", "nowhere") if row[0] != "ok"]
    assert odd[0][:2] == ("warning", "webhook")
    assert {status for status, _, _ in odd} == {"warning"}
    assert all("nowhere" in row[2] for row in odd)


def test_nvidias_feature_discovery_gives_no_cards_out(world: World) -> None:
    stock_plugin(world, "gpu-feature-discovery-ctr")
    assert {status for status, _, _ in world.findings()} == {"ok"}


def test_whole_cards_that_are_left_to_the_other_plugin(world: World) -> None:
    stock_plugin(world)
    world.installed.says("n2", whole_cards="nvidia")
    assert {status for status, _, _ in world.findings()} == {"ok"}


@pytest.mark.parametrize(
    ("device_list", "variable", "mounts", "status"),
    [
        ("env", True, False, "warning"),
        ("env", False, True, "failed"),
        ("mounts", False, True, "ok"),
        ("mounts", True, True, "warning"),
        ("mounts", False, False, "failed"),
    ],
)
def test_whether_cards_reach_those_alone_that_were_given(
    world: World, device_list: str, variable: bool, mounts: bool, status: str
) -> None:
    settings(world, f"deviceplugin: {{deviceList: {device_list}}}")
    world.installed.says("n1", toolkit=Toolkit(variable, mounts))
    findings = {check: status for status, check, _ in world.findings()}
    assert findings.pop("isolation") == status
    assert set(findings.values()) == {"ok"}


def test_a_node_whose_mps_folders_are_not_mounts_fails_with_the_remedy(world: World) -> None:
    world.installed.says("n1", mps_unbounded=True)
    ((status, check, message),) = [row for row in world.findings() if row[0] != "ok"]
    assert (status, check) == ("failed", "mps")
    assert "on n1 containers write to folders of deviceplugin.mpsDir" in message


def settings(world: World, text: str) -> None:
    data = {"mgpu.yaml": text}
    world.api.create(f"/api/v1/namespaces/{SYSTEM}/configmaps", {"metadata": {"name": "mgpu-config"}, "data": data})


RECORD_KEYS = f"/api/v1/namespaces/{SYSTEM}/configmaps/mgpu-record-keys"


def records_found(world: World) -> tuple[str, str]:
    ((status, _, message),) = [row for row in world.findings() if row[1] == "records"]
    return status, message


def test_records_that_are_not_sealed_are_a_warning(world: World) -> None:
    world.api.delete(RECORD_KEYS)
    assert records_found(world) == (
        "warning",
        "records are not sealed: every record that admission allows counts",
    )


def test_pods_with_records_that_mgpu_did_not_decide_are_named(world: World) -> None:
    world.api.patch(RECORD_KEYS, {"data": {"since": "2026-01-01T00:00:00Z"}})
    thief = share("thief", annotations={RECORD: "0"}, node="n1", uid="", namespace=SYSTEM)
    world.api.create(PODS, thief)  # where admission does not look
    assert records_found(world) == (
        "failed",
        "pods have records that mgpu did not decide: mgpu-system/thief (UnsealedRecord)",
    )


def test_keys_that_cannot_be_read_are_named(world: World) -> None:
    world.api.patch(RECORD_KEYS, {"data": {"since": "yesterday"}})
    status, message = records_found(world)
    assert status == "failed"
    assert "mgpu-record-keys[since]: must be a time such as 2026-01-31T12:00:00Z, not 'yesterday'" in message


def callers_found(world: World) -> list[tuple[str, str, str]]:
    return [row for row in world.findings() if row[1] == "callers"]


def test_endpoints_that_every_address_may_call_are_named(world: World) -> None:
    settings(world, "webhook: {apiServers: ['0.0.0.0/0', '::/0']}\nscheduler: {apiServers: [192.0.2.1]}")
    ((status, _, message),) = callers_found(world)
    assert status == "warning"
    assert "webhook.apiServers lets every address call mgpu-webhook" in message


def test_an_open_endpoint_that_asks_for_client_certificates_is_no_fault(world: World) -> None:
    settings(world, "webhook: {clientCa: /ca.crt, apiServers: [0.0.0.0/0]}\nscheduler: {clientCa: /ca.crt}")
    ((status, _, message),) = callers_found(world)
    assert status == "ok"
    assert "scheduler: clients with a certificate" in message


def test_who_may_call_by_the_environment_of_a_deployment_is_seen(world: World) -> None:
    source = {"configMapKeyRef": {"name": "mgpu-api-servers", "key": "apiServers", "optional": True}}
    path = f"{APPS}/deployments/mgpu-webhook"
    found = world.api.get(path)
    (container,) = found["spec"]["template"]["spec"]["containers"]
    container["env"] = [{"name": "MGPU_WEBHOOK__APISERVERS", "valueFrom": source}]
    world.api.replace(path, found)
    data = {"apiServers": "0.0.0.0/1, 128.0.0.0/1"}
    body = {"metadata": {"name": "mgpu-api-servers"}, "data": data}
    world.api.create(f"/api/v1/namespaces/{SYSTEM}/configmaps", body)
    ((status, _, message),) = callers_found(world)
    assert (status, "webhook.apiServers lets every address" in message) == ("warning", True)
    world.api.patch(f"/api/v1/namespaces/{SYSTEM}/configmaps/mgpu-api-servers", {"data": {"apiServers": "no"}})
    ((status, _, message),) = callers_found(world)
    assert (status, "the environment of mgpu-webhook is not valid" in message) == ("failed", True)


def test_blocks_with_addresses_of_pods_are_named_and_a_node_s_own_address_is_not(world: World) -> None:
    world.api.patch(f"{NODES}/n1", {"spec": {"podCIDRs": ["10.244.1.0/24"]}})
    settings(world, "webhook: {apiServers: [10.0.0.0/8]}\nscheduler: {apiServers: [10.244.1.1]}")
    ((status, _, message),) = callers_found(world)
    assert status == "warning"
    assert message == "webhook.apiServers includes addresses of pods: 10.244.1.0/24 (n1)"


def test_the_settings_of_the_cluster_hold(world: World) -> None:
    settings(world, "dialects: {mgpu: {enabled: false}, mtgpu: {enabled: false}}")
    no_resources(world)
    world.api.delete(f"{DEFINITIONS}/mtgpupods.lsalab.nthu")
    findings = world.findings()
    assert {status for status, _, _ in findings} == {"ok"}, findings
    assert findings[0][2] == "ConfigMap mgpu-system/mgpu-config"


def test_settings_that_cannot_be_read_are_one_fault_among_others(world: World, tmp_path: Path) -> None:
    settings(world, "cardPolicy: nope")
    odd = [row for row in world.findings() if row[0] != "ok"]
    assert [row[:2] for row in odd] == [("failed", "settings")]
    assert "ConfigMap mgpu-system/mgpu-config: cardPolicy: " in odd[0][2]
    file = tmp_path / "mgpu.yaml"
    file.write_text("cardPolicy: nope")
    assert world.doctor("--config", str(file)).exit_code == 2


def test_certificates_of_somebody_else(world: World) -> None:
    """As with cert-manager: the Deployment mounts them."""
    path = f"{APPS}/deployments/mgpu-webhook"
    found = world.api.get(path)
    volume = {"name": "tls", "secret": {"secretName": "mgpu-webhook-cert"}}
    found["spec"]["template"]["spec"]["volumes"] = [volume]
    world.api.replace(path, found)
    old = certificate(world.folder / "old", days_old=100)
    keep_in_secret(world.api, "mgpu-webhook-cert", old)
    odd = [row for row in world.findings() if row[0] != "ok"]
    assert [row[1] for row in odd] == ["certificates", "ca bundles", "ca bundles", "ca bundles"]
    assert "the one in Secret mgpu-webhook-cert expired" in odd[0][2]


class Guarded(Api):
    """For a user who may not read Leases, Pods of all namespaces, Nodes, Secrets."""

    def get(self, path: str, **query: object) -> dict[str, Any]:
        self._refuse(path)
        return super().get(path, **query)

    def pages(self, path: str, **query: object) -> Iterator[tuple[list[dict[str, Any]], str]]:
        self._refuse(path)
        return super().pages(path, **query)

    @staticmethod
    def _refuse(path: str) -> None:
        if path.rpartition("/")[2] in ("leases", "nodes") or path == "/api/v1/pods" or "/secrets/" in path:
            raise ApiError(403, "Forbidden", f"you may not get {path}")


def test_what_may_not_be_read_is_no_fault(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgpu.cli.doctor.command.Api", Guarded)
    findings = world.findings()
    assert findings[-1] == (
        "warning",
        "rights",
        "you may not read leases, nodes, pods, so some checks are incomplete",
    )
    assert {status for status, _, _ in findings[:-1]} == {"ok"}
    assert ("ok", "certificates") in [row[:2] for row in findings]


def test_who_may_not_try_a_pod_is_told_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = 'pods is forbidden: User "u" cannot create resource "pods" in API group "" in the namespace "default"'

    class Refused(Api):
        def create(self, path: str, body: Any, **query: object) -> dict[str, Any]:  # noqa: ARG002
            assert query == {"dryRun": "All"}
            raise ApiError(403, "Forbidden", refused)

    monkeypatch.setattr("mgpu.cli.doctor.command.Api", Refused)
    odd = [row for row in world.findings() if row[0] != "ok"]
    assert [row[:2] for row in odd] == [("warning", "webhook"), ("warning", "bindings")]
    assert all(refused in row[2] for row in odd)


def test_one_binding_that_was_not_answered_in_time_is_no_fault(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    late = ["it passes, since failurePolicy is Ignore"]

    class Slow(Api):
        def create(self, path: str, body: Any, **query: object) -> dict[str, Any]:
            if path.endswith("/binding") and late:
                late.clear()
                raise ApiError(404, "NotFound", 'pods "mgpu-doctor" not found')
            return super().create(path, body, **query)

    monkeypatch.setattr("mgpu.cli.doctor.command.Api", Slow)
    assert {status for status, _, _ in world.findings()} == {"ok"}
    assert not late


def test_a_webhook_that_is_not_asked(world: World) -> None:
    path = f"{COLLECTIONS}/{VALIDATING}/mgpu-webhook"
    found = world.api.get(path)
    found["webhooks"][0]["rules"] = found["webhooks"][1]["rules"]
    world.api.replace(path, found)
    odd = [row for row in world.findings() if row[0] != "ok"]
    assert [row[:2] for row in odd] == [("failed", "webhook")]
    assert "was admitted" in odd[0][2]


def test_a_cluster_without_it(world: World) -> None:
    for kind in (MUTATING, VALIDATING):
        for row in world.api.list(f"{COLLECTIONS}/{kind}")[0]:
            world.api.delete(f"{COLLECTIONS}/{kind}/{row['metadata']['name']}")
    for path in ("deployments/mgpu-webhook", "deployments/mgpu-scheduler", "daemonsets/mgpu-deviceplugin"):
        world.api.delete(f"{APPS}/{path}")
    assert [row for row in world.findings() if row[0] != "ok"] == [
        ("failed", "installation", "mgpu is not installed in this cluster")
    ]


def test_another_namespace_than_that_where_it_is(world: World) -> None:
    path = f"{COLLECTIONS}/{MUTATING}/mgpu-scheduler"
    found = world.api.get(path)
    found["webhooks"][0]["clientConfig"] = {"service": {"name": "mgpu-scheduler", "namespace": SYSTEM}}
    world.api.replace(path, found)
    (_, odd) = world.findings("-n", "elsewhere")
    text = "namespace elsewhere has no part of mgpu; the webhooks refer to mgpu-system"
    assert odd == ("failed", "installation", text)


def test_one_line_for_each_finding_and_what_to_do(world: World) -> None:
    no_crd(world)
    result = world.doctor()
    lines = result.stdout.splitlines()
    assert (result.exit_code, len(lines)) == (1, len(CHECKS))
    assert lines[1] == (
        "failed   custom resources: the CRD of Device (scheduling.koordinator.sh/v1alpha1) is missing; "
        "do: kubectl apply -k manifests/crds"
    )


def test_bad_input_is_one_line() -> None:
    result = CliRunner().invoke(main, ["doctor", "--kubeconfig", "/nowhere/kubeconfig"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_a_cluster_that_does_not_answer(world: World) -> None:
    config = Path(world.kubeconfig)
    text: Any = config.read_text()
    port = json.dumps(free_port())
    config.write_text(text.replace(text.partition("127.0.0.1:")[2].split("\n")[0].strip('"'), port))
    result = world.doctor()
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
