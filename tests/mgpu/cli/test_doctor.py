"""`mgpu doctor` reports each fault of an installation, and nothing else."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mgpu.cli.main import main
from mgpu.cli.scheduler_source import SERVICE
from mgpu.kube import Api, ApiError
from mgpu.kube.leader import Leader
from mgpu.model.usage_problems import UsageProblem
from mgpu.serving.callers import Callers
from mgpu.serving.certificates import CA, Files
from mgpu.version import VERSION_LABEL, IsolationReport, Toolkit
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
    restored,
    trust,
    webhook,
)

RECORD = "vke.volcengine.com/gpu-index-container-c"
RECORD_KEYS = f"/api/v1/namespaces/{SYSTEM}/configmaps/mgpu-record-keys"
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
    "claims",
    "commands",
    "cards",
    "agents",
    "node resources",
    "cdi",
    "nvidia plugin",
    "versions",
]


class World:
    """A playground API server with an installation that has no fault.

    kubeconfig: of an administrator. files: the certificate that the webhook serves.
    """

    def __init__(self, folder: Path, files: Files, stack: ExitStack) -> None:
        self.folder, self.files, self._stack = folder, files, stack
        tls = self_signed(folder)
        self.server = ApiServer(tokens={"admin": User("admin", ("system:masters",))})
        url = stack.enter_context(running(self.server, tls=tls))
        self.kubeconfig = str(folder / "kubeconfig")
        write_kubeconfig(folder / "kubeconfig", url, Path(tls[0]).read_bytes(), "admin")
        self.api = Api.connect(self.kubeconfig)
        stack.callback(self.api.close)
        self.installed = Installation(self.api)

    @contextmanager
    def for_one_test(self, folder: Path) -> Iterator["World"]:
        """Yield this world, and then undo what the test has changed and end what it serves."""
        with ExitStack() as stack, restored(self.server):
            self.installed.elect()
            world = copy(self)
            world.folder, world._stack = folder, stack
            yield world

    def serve(self, files: Files, name: str, callers: Callers | None = None) -> int:
        return self._stack.enter_context(webhook(files, self.folder / name, self.api, callers))

    def lead_to(self, port: int, name: str = "mgpu-webhook") -> None:
        def change(configuration: dict[str, Any]) -> None:
            client = configuration["webhooks"][0]["clientConfig"]
            client["url"] = f"https://127.0.0.1:{port}/{client['url'].rpartition('/')[2]}"

        for kind in (MUTATING, VALIDATING) if name == "mgpu-webhook" else (MUTATING,):
            self.edit(f"{COLLECTIONS}/{kind}/{name}", change)

    def doctor(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, ["doctor", "--kubeconfig", self.kubeconfig, *arguments])

    def findings(self, *arguments: str) -> list[tuple[str, str, str]]:
        result = self.doctor("-o", "json", *arguments)
        answer = json.loads(result.stdout)
        assert (result.exit_code == 0) == answer["ok"], result.output
        assert all((row["remedy"] == "") == (row["status"] == "ok") for row in answer["checks"]), result.output
        return [(row["status"], row["check"], row["message"]) for row in answer["checks"]]

    def problems(self, *arguments: str) -> list[tuple[str, str, str]]:
        return [finding for finding in self.findings(*arguments) if finding[0] != "ok"]

    def edit(self, path: str, change: Callable[[dict[str, Any]], object]) -> None:
        raw = self.api.get(path)
        change(raw)
        self.api.replace(path, raw)

    def configure(self, text: str) -> None:
        self.config_map("mgpu-config", {"mgpu.yaml": text})

    def config_map(self, name: str, data: dict[str, str]) -> None:
        self.api.create(f"/api/v1/namespaces/{SYSTEM}/configmaps", {"metadata": {"name": name}, "data": data})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory: pytest.TempPathFactory, files: Files) -> Iterator[World]:
    with ExitStack() as stack:
        world = World(tmp_path_factory.mktemp("world"), files, stack)
        port = world.serve(files, "served")
        world.installed.install(files, port)
        world.server.services.urls[SYSTEM, SERVICE] = f"https://127.0.0.1:{port}"
        yield world


@pytest.fixture
def world(shared_world: World, tmp_path: Path) -> Iterator[World]:
    with shared_world.for_one_test(tmp_path) as world:
        yield world


def test_doctor_of_an_installation_without_faults_reports_every_check_as_ok(world: World) -> None:
    assert [finding[:2] for finding in world.findings()] == [("ok", check) for check in CHECKS]


def unreachable(world: World) -> None:
    world.lead_to(free_port())


def rejects_the_api_server(world: World) -> None:
    world.lead_to(world.serve(world.files, "door", callers=Callers("webhook.apiServers", ())))


def expired(world: World) -> None:
    old = certificate(world.folder / "old", days_old=100)
    world.installed.trust(old)
    world.lead_to(world.serve(old, "served-old"))


def expired_and_secrets_hidden(world: World) -> None:
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


def stale_bundle_and_secrets_hidden(world: World) -> None:
    stale_bundle(world)
    no_secrets(world)


def stale_bundle_of_bindings(world: World) -> None:
    trust(world.api, MUTATING, "mgpu-scheduler", certificate(world.folder / "other")[CA])


def stale_bundle_of_bindings_and_secrets_hidden(world: World) -> None:
    stale_bundle_of_bindings(world)
    no_secrets(world)


def bindings_unreachable(world: World) -> None:
    world.lead_to(free_port(), "mgpu-scheduler")


def bindings_webhook_not_called(world: World) -> None:
    resources = {"resources": ["pods"]}
    world.edit(f"{COLLECTIONS}/{MUTATING}/mgpu-scheduler", lambda raw: raw["webhooks"][0]["rules"][0].update(resources))


def webhook_not_called(world: World) -> None:
    path = f"{COLLECTIONS}/{VALIDATING}/mgpu-webhook"
    world.edit(path, lambda raw: raw["webhooks"][0].update(rules=raw["webhooks"][1]["rules"]))


def another_scheduler_decides(world: World) -> None:
    """Two pods have records that name card 1, as if a scheduler with its own ledger had decided one of them."""
    for pod in ("ours", "theirs"):
        bound(world, pod, {RECORD: "1", "vke.volcengine.com/assumed": "true"})


def bound(world: World, name: str, record: dict[str, str]) -> None:
    """Create a bound pod in mgpu's namespace, which the webhooks exempt."""
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
    raw = world.api.get(f"{NODES}/n2")
    for key in ("capacity", "allocatable"):
        del raw["status"][key]["vke.volcengine.com/mgpu-core"]
    world.api.replace(f"{NODES}/n2/status", raw)


def resources_not_allocatable(world: World) -> None:
    """The kubelet reports this after the agent's socket is gone."""
    amounts = {"vke.volcengine.com/mgpu-core": "0"}
    world.api.patch(f"{NODES}/n2/status", {"status": {"allocatable": amounts}})


def two_leaders(world: World) -> None:
    world.api.create("/api/v1/namespaces", {"metadata": {"name": "other"}})
    Leader(world.api, "other", "mgpu-scheduler", "x").round()


def two_configurations(world: World) -> None:
    raw = world.api.get(f"{COLLECTIONS}/{MUTATING}/mgpu-scheduler")
    world.api.create(f"{COLLECTIONS}/{MUTATING}", {**raw, "metadata": {"name": "mgpu-scheduler-2"}})


def no_election(world: World) -> None:
    world.api.delete(f"{APPS}/deployments/mgpu-scheduler")
    world.installed.workload("deployments", "Deployment", "mgpu-scheduler", 2, "scheduler", "--no-leader-elect")


def no_election_in_a_sidecar(world: World) -> None:
    def change(deployment: dict[str, Any]) -> None:
        pod = deployment["spec"]["template"]["spec"]
        pod["initContainers"] = [{**pod["containers"][0], "restartPolicy": "Always"}]
        pod["containers"] = [{"name": "kube-scheduler", "image": "kube-scheduler"}]

    no_election(world)
    world.edit(f"{APPS}/deployments/mgpu-scheduler", change)


def two_pods_are_labelled(world: World) -> None:
    world.installed.leads("mgpu-scheduler-b")


def no_pod_is_labelled(world: World) -> None:
    world.installed.leads("mgpu-scheduler-a", None)


def no_pod_knows_its_uid(world: World) -> None:
    no_pod_is_labelled(world)
    path = f"{APPS}/deployments/mgpu-scheduler"
    world.edit(path, lambda raw: raw["spec"]["template"]["spec"]["containers"][0].update(env=[]))


def no_cdi(world: World) -> None:
    world.installed.says("n1", cdi=False)


def nvidia_plugin(world: World, container: str = "nvidia-device-plugin-ctr") -> None:
    image = "nvidia/k8s-device-plugin:v0.17.0"
    world.installed.pod("nvidia-device-plugin-x", "", "n2", image=image, container=container)


def other_versions(world: World) -> None:
    world.installed.says("n2", version="0.0.9")


def another_webhook_version(world: World) -> None:
    labels = {VERSION_LABEL: "0.0.9"}
    world.api.patch(f"{APPS}/deployments/mgpu-webhook", {"spec": {"template": {"metadata": {"labels": labels}}}})


def lease_not_renewed(world: World) -> None:
    world.api.delete(f"{LEASES.format(SYSTEM)}/mgpu-scheduler")


def no_configuration(world: World) -> None:
    world.api.delete(f"{COLLECTIONS}/{VALIDATING}/mgpu-webhook")


def isolation_does_not_work(world: World) -> None:
    world.installed.says("n1", isolation=IsolationReport("driver", "the driver is older than R615"))


def use_is_not_measured(world: World) -> None:
    world.installed.says("n1", usage_problem=UsageProblem.PROC_NOT_READABLE)
    world.installed.says("n2", usage_problem=UsageProblem.NO_HOST_PIDS)  # is no fault


def mps_folders_are_no_mounts(world: World) -> None:
    world.installed.says("n1", mps_unbounded=True)


def unknown_cdi(world: World) -> None:
    world.installed.says("n1", cdi=None)


def unreadable_record(world: World) -> None:
    bound(world, "odd", {RECORD: "x"})


def unsealed_records(world: World) -> None:
    world.api.delete(RECORD_KEYS)


def foreign_record(world: World) -> None:
    """The pod is in mgpu's namespace, which the webhooks exempt."""
    world.api.patch(RECORD_KEYS, {"data": {"since": "2026-01-01T00:00:00Z"}})
    world.api.create(PODS, share("thief", annotations={RECORD: "0"}, node="n1", uid="", namespace=SYSTEM))


def unreadable_keys(world: World) -> None:
    world.api.patch(RECORD_KEYS, {"data": {"since": "yesterday"}})


def open_endpoint(world: World) -> None:
    world.configure("webhook: {apiServers: ['0.0.0.0/0', '::/0']}\nscheduler: {apiServers: [192.0.2.1]}")


def callers_include_pods(world: World) -> None:
    """The single address of `scheduler` may be the node's own."""
    world.api.patch(f"{NODES}/n1", {"spec": {"podCIDRs": ["10.244.1.0/24"]}})
    world.configure("webhook: {apiServers: [10.0.0.0/8]}\nscheduler: {apiServers: [10.244.1.1]}")


def api_servers_by_environment(world: World, addresses: str) -> None:
    source = {"configMapKeyRef": {"name": "mgpu-api-servers", "key": "apiServers", "optional": True}}
    env = [{"name": "MGPU_WEBHOOK__APISERVERS", "valueFrom": source}]
    path = f"{APPS}/deployments/mgpu-webhook"
    world.edit(path, lambda raw: raw["spec"]["template"]["spec"]["containers"][0].update(env=env))
    world.config_map("mgpu-api-servers", {"apiServers": addresses})


def open_endpoint_by_environment(world: World) -> None:
    api_servers_by_environment(world, "0.0.0.0/1, 128.0.0.0/1")


def invalid_environment(world: World) -> None:
    api_servers_by_environment(world, "no")


def invalid_settings(world: World) -> None:
    world.configure("cardPolicy: nope")


FAULTS: dict[Callable[[World], None], tuple[str, str, str]] = {
    unreachable: ("failed", "webhook", "the API server does not reach the webhook"),
    rejects_the_api_server: ("failed", "webhook", "the webhook rejects the API server: "),
    webhook_not_called: ("failed", "webhook", "was admitted"),
    no_configuration: ("failed", "webhook", "there is no validatingwebhookconfiguration mgpu-webhook"),
    expired: ("failed", "certificates", "the certificate in Secret mgpu-webhook-tls expired"),
    expired_and_secrets_hidden: ("failed", "certificates", "the webhook's certificate is not valid now"),
    stale_bundle: (
        "failed",
        "ca bundles",
        "mutate.mgpu.io: the CA bundle does not fit the certificate in Secret mgpu-webhook-tls",
    ),
    stale_bundle_and_secrets_hidden: (
        "failed",
        "ca bundles",
        "the API server does not trust the webhook's certificate",
    ),
    stale_bundle_of_bindings: ("failed", "ca bundles", "bind.mgpu.io: the CA bundle does not fit"),
    stale_bundle_of_bindings_and_secrets_hidden: ("failed", "bindings", "Bindings do not reach mgpu"),
    bindings_unreachable: ("failed", "bindings", "Bindings do not reach mgpu"),
    bindings_webhook_not_called: ("failed", "bindings", "Bindings do not reach mgpu"),
    another_scheduler_decides: (
        "failed",
        "cards",
        "card 1 of n2 (pods hold 120% and 2.0 GiB of it: mgpu-system/ours, mgpu-system/theirs)",
    ),
    unreadable_record: ("warning", "cards", "Pod mgpu-system/odd"),
    no_crd: ("failed", "custom resources", "the CRD of Device (scheduling.koordinator.sh/v1alpha1) is missing"),
    no_agent: ("failed", "agents", "no agent serves n2: DaemonSet mgpu-deviceplugin has no Pod there"),
    agent_not_ready: ("failed", "agents", "no agent serves n2: its Pod is not ready (Running)"),
    no_resources: ("failed", "node resources", "n2: no vke.volcengine.com/mgpu-core in its status"),
    resources_not_allocatable: ("failed", "node resources", "n2: no vke.volcengine.com/mgpu-core in its status"),
    two_leaders: (
        "failed",
        "scheduler",
        "several schedulers decide: one leads in each of the namespaces mgpu-system, other",
    ),
    two_configurations: (
        "failed",
        "scheduler",
        "several schedulers decide: mgpu-scheduler, mgpu-scheduler-2 all answer Bindings",
    ),
    no_election: ("failed", "scheduler", "several schedulers decide: leader election is off, and there are 2 replicas"),
    no_election_in_a_sidecar: ("failed", "scheduler", "leader election is off, and there are 2 replicas"),
    two_pods_are_labelled: ("failed", "scheduler", "the Service selects mgpu-scheduler-a, mgpu-scheduler-b: Bindings"),
    no_pod_is_labelled: ("failed", "scheduler", "the Service selects no Pod: none has the label mgpu.io/leads"),
    no_pod_knows_its_uid: ("failed", "scheduler", "so cards are decided late; the Pods do not know their uid"),
    lease_not_renewed: ("failed", "scheduler", "no scheduler decides: the Lease mgpu-scheduler is not renewed"),
    no_cdi: ("failed", "cdi", "CDI is off in the container runtime of n1"),
    unknown_cdi: ("warning", "cdi", "it is unknown whether CDI is on in the container runtime of n1"),
    isolation_does_not_work: ("failed", "limits", "isolation driver on n1: the driver is older than R615"),
    use_is_not_measured: ("warning", "usage", "on n1 the cgroups of other containers' processes"),
    mps_folders_are_no_mounts: ("failed", "mps", "on n1 containers write to folders of deviceplugin.mpsDir"),
    nvidia_plugin: ("failed", "nvidia plugin", "it runs on n2, where mgpu serves nvidia.com/gpu too"),
    other_versions: ("failed", "versions", "parts have different versions: 0.0.9: agent of n2; 0.1.0: "),
    another_webhook_version: ("failed", "versions", "parts have different versions: 0.0.9: webhook; 0.1.0: "),
    unsealed_records: ("warning", "records", "records are not sealed: every record that admission allows counts"),
    foreign_record: (
        "failed",
        "records",
        "pods have records that mgpu did not decide: mgpu-system/thief (UnsealedRecord)",
    ),
    unreadable_keys: (
        "failed",
        "records",
        "mgpu-record-keys[since]: must be a time such as 2026-01-31T12:00:00Z, not 'yesterday'",
    ),
    open_endpoint: ("warning", "callers", "webhook.apiServers lets every address call mgpu-webhook"),
    open_endpoint_by_environment: ("warning", "callers", "webhook.apiServers lets every address call mgpu-webhook"),
    invalid_environment: ("failed", "callers", "the environment of mgpu-webhook is not valid"),
    callers_include_pods: (
        "warning",
        "callers",
        "webhook.apiServers includes addresses of pods: 10.244.1.0/24 (n1)",
    ),
    invalid_settings: ("failed", "settings", "ConfigMap mgpu-system/mgpu-config: cardPolicy: "),
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_doctor_of_an_installation_with_one_fault_reports_this_fault_alone(
    world: World, plant: Callable[[World], None]
) -> None:
    plant(world)
    problems = world.problems()
    status, check, message = FAULTS[plant]
    assert {problem[:2] for problem in problems} == {(status, check)}, problems
    assert any(message in problem[2] for problem in problems), problems


def test_doctor_of_a_scheduler_without_lease_and_deployment_reports_one_scheduler_if_it_answers(world: World) -> None:
    """A scheduler that is started by hand has no object in the API."""
    lease_not_renewed(world)
    world.api.delete(f"{APPS}/deployments/mgpu-scheduler")
    assert ("ok", "scheduler", "one scheduler found (leader election is off)") in world.findings()
    bindings_unreachable(world)
    assert "scheduler" not in [check for _, check, _ in world.findings()]


def test_doctor_that_tries_in_the_namespace_of_mgpu_is_an_input_error(world: World) -> None:
    result = world.doctor("--try-in", SYSTEM)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--try-in: must be another namespace" in result.stderr


def test_doctor_that_tries_in_a_missing_namespace_warns(world: World) -> None:
    problems = world.problems("--try-in", "nowhere")
    assert problems[0][:2] == ("warning", "webhook")
    assert {status for status, _, _ in problems} == {"warning"}
    assert all("nowhere" in message for _, _, message in problems)


def test_doctor_with_nvidias_feature_discovery_reports_no_other_plugin(world: World) -> None:
    nvidia_plugin(world, "gpu-feature-discovery-ctr")
    assert world.problems() == []


def test_doctor_with_nvidias_plugin_on_its_own_nodes_reports_no_problem(world: World) -> None:
    nvidia_plugin(world)
    world.installed.says("n2", whole_cards="nvidia")
    assert world.problems() == []


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
def test_isolation_depends_on_the_device_list_and_the_toolkit(
    world: World, device_list: str, variable: bool, mounts: bool, status: str
) -> None:
    world.configure(f"deviceplugin: {{deviceList: {device_list}}}")
    world.installed.says("n1", toolkit=Toolkit(variable, mounts))
    findings = {check: status for status, check, _ in world.findings()}
    assert findings.pop("isolation") == status
    assert set(findings.values()) == {"ok"}


def test_callers_of_an_open_endpoint_with_client_certificates_are_ok(world: World) -> None:
    world.configure("webhook: {clientCa: /ca.crt, apiServers: [0.0.0.0/0]}\nscheduler: {clientCa: /ca.crt}")
    ((status, message),) = [(status, message) for status, check, message in world.findings() if check == "callers"]
    assert status == "ok"
    assert "scheduler: clients with a certificate" in message


def test_doctor_uses_the_settings_of_the_cluster(world: World) -> None:
    world.configure("dialects: {mgpu: {enabled: false}, mtgpu: {enabled: false}}")
    no_resources(world)
    world.api.delete(f"{DEFINITIONS}/mtgpupods.lsalab.nthu")
    assert world.problems() == []
    assert world.findings()[0][2] == "ConfigMap mgpu-system/mgpu-config"


def test_doctor_with_an_invalid_settings_file_is_an_input_error(world: World, tmp_path: Path) -> None:
    file = tmp_path / "mgpu.yaml"
    file.write_text("cardPolicy: nope")
    assert world.doctor("--config", str(file)).exit_code == 2


def test_doctor_checks_a_mounted_certificate(world: World) -> None:
    """With cert-manager the Deployment mounts the Secret."""
    volume = {"name": "tls", "secret": {"secretName": "mgpu-webhook-cert"}}
    path = f"{APPS}/deployments/mgpu-webhook"
    world.edit(path, lambda raw: raw["spec"]["template"]["spec"].update(volumes=[volume]))
    keep_in_secret(world.api, "mgpu-webhook-cert", certificate(world.folder / "old", days_old=100))
    problems = world.problems()
    assert [check for _, check, _ in problems] == ["certificates", "ca bundles", "ca bundles", "ca bundles"]
    assert "the certificate in Secret mgpu-webhook-cert expired" in problems[0][2]


class RestrictedApi(Api):
    """The API of a user who may not read Leases, Nodes, Secrets and the Pods of all namespaces."""

    def get(self, path: str, **query: object) -> dict[str, Any]:
        self._check(path)
        return super().get(path, **query)

    def pages(self, path: str, **query: object) -> Iterator[tuple[Iterable[dict[str, Any]], str]]:
        self._check(path)
        return super().pages(path, **query)

    @staticmethod
    def _check(path: str) -> None:
        if path.rpartition("/")[2] in ("leases", "nodes") or path == "/api/v1/pods" or "/secrets/" in path:
            raise ApiError(403, "Forbidden", f"you may not get {path}")


def test_doctor_of_a_user_with_few_rights_warns_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgpu.cli.doctor.command.Api", RestrictedApi)
    findings = world.findings()
    text = "you may not read leases, nodes, pods, so some checks are incomplete"
    assert findings[-1] == ("warning", "rights", text)
    assert {status for status, _, _ in findings[:-1]} == {"ok"}
    assert ("ok", "certificates") in [finding[:2] for finding in findings]


def test_doctor_of_a_user_who_may_not_list_mtgpupods_warns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class ForbiddenApi(Api):
        def pages(self, path: str, **query: object) -> Iterator[tuple[Iterable[dict[str, Any]], str]]:
            if path.endswith("/mtgpupods"):
                raise ApiError(403, "Forbidden", "you may not list mtgpupods")
            return super().pages(path, **query)

    monkeypatch.setattr("mgpu.cli.doctor.command.Api", ForbiddenApi)
    text = "you may not read mtgpupods, so some checks are incomplete"
    assert world.problems() == [("warning", "rights", text)]


def test_doctor_of_a_user_who_may_not_create_pods_warns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = 'pods is forbidden: User "u" cannot create resource "pods" in API group "" in the namespace "default"'

    class ForbiddenApi(Api):
        def create(self, path: str, body: Any, **query: object) -> dict[str, Any]:
            if path.endswith("/token"):  # of the service account with which the commands ask the scheduler
                return super().create(path, body, **query)
            assert query == {"dryRun": "All"}
            raise ApiError(403, "Forbidden", forbidden)

    monkeypatch.setattr("mgpu.cli.doctor.command.Api", ForbiddenApi)
    problems = world.problems()
    assert [problem[:2] for problem in problems] == [("warning", "webhook"), ("warning", "bindings")]
    assert all(forbidden in message for _, _, message in problems)


def test_bindings_whose_first_dry_run_times_out_are_ok(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With failurePolicy Ignore, the API server then answers that the Pod does not exist."""
    attempts: list[str] = []

    class SlowApi(Api):
        def create(self, path: str, body: Any, **query: object) -> dict[str, Any]:
            if path.endswith("/binding"):
                attempts.append(path)
                if len(attempts) == 1:
                    raise ApiError(404, "NotFound", 'pods "mgpu-doctor" not found')
            return super().create(path, body, **query)

    monkeypatch.setattr("mgpu.cli.doctor.command.Api", SlowApi)
    assert world.problems() == []
    assert len(attempts) == 2


def test_doctor_of_a_cluster_without_mgpu_reports_only_that(world: World) -> None:
    for kind in (MUTATING, VALIDATING):
        for row in world.api.list(f"{COLLECTIONS}/{kind}")[0]:
            world.api.delete(f"{COLLECTIONS}/{kind}/{row['metadata']['name']}")
    for path in ("deployments/mgpu-webhook", "deployments/mgpu-scheduler", "daemonsets/mgpu-deviceplugin"):
        world.api.delete(f"{APPS}/{path}")
    assert world.problems() == [("failed", "installation", "mgpu is not installed in this cluster")]


def test_doctor_of_another_namespace_names_the_namespace_of_mgpu(world: World) -> None:
    client = {"service": {"name": "mgpu-scheduler", "namespace": SYSTEM}}
    path = f"{COLLECTIONS}/{MUTATING}/mgpu-scheduler"
    world.edit(path, lambda raw: raw["webhooks"][0].update(clientConfig=client))
    text = "namespace elsewhere has no part of mgpu; the webhooks refer to mgpu-system"
    assert world.problems("-n", "elsewhere") == [("failed", "installation", text)]


def test_doctor_without_terminal_prints_one_line_with_the_remedy_for_each_finding(world: World) -> None:
    no_crd(world)
    result = world.doctor()
    lines = result.stdout.splitlines()
    assert (result.exit_code, len(lines)) == (1, len(CHECKS))
    assert lines[1] == (
        "failed   custom resources: the CRD of Device (scheduling.koordinator.sh/v1alpha1) is missing; "
        "do: kubectl apply -k manifests/crds"
    )


def test_doctor_with_a_missing_kubeconfig_is_an_input_error_on_one_line() -> None:
    result = CliRunner().invoke(main, ["doctor", "--kubeconfig", "/nowhere/kubeconfig"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_doctor_of_a_cluster_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    certificate = Path(self_signed(tmp_path)[0]).read_bytes()
    write_kubeconfig(tmp_path / "kubeconfig", f"https://127.0.0.1:{free_port()}", certificate, "admin")
    result = CliRunner().invoke(main, ["doctor", "--kubeconfig", str(tmp_path / "kubeconfig")])
    assert result.exit_code == 1
    assert result.stderr.startswith("Unable to connect to the server: ")
