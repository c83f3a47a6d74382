"""The rendered kustomizations are consistent, fit the processes, and are valid for the API server."""

import json
import re
import subprocess
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kubernetes.client as client
import pytest
import yaml

from deviceplugin.delivery import visibility
from deviceplugin.dra.prepared_claims import plugin_folder
from mgpu.cli.process_settings import read_settings
from mgpu.kube.leader import LABEL
from mgpu.model.resource_claims import DRIVER, MARK
from mgpu.serving import server
from mgpu.settings import Settings
from playground.apiserver.kinds import BUILT_IN
from playground.apiserver.object_decoding import decode
from playground.managed_resources import MANAGED
from scheduler.leadership import REPLICAS
from tests.manifests.rendered import (
    COMPONENTS,
    FOLDERS,
    MANIFESTS,
    OVERLAYS,
    Json,
    containers,
    kustomization,
    named,
    of_kind,
    rendered,
    running_mgpu,
    text_of,
    workloads,
)

EVERYWHERE = pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
_KINDS = {(kind.api_version, kind.kind): kind for kind in BUILT_IN}
_OTHERS = {"cert-manager.io/v1"}
"""Kinds that somebody else defines."""
_FLAGS = {
    "--metrics-port": "metricsPort",
    "--web-port": "webPort",
    "--health-port": "healthPort",
    "--cert-dir": "certDir",
    "--extender-host": "extenderHost",
}
_ENVIRONMENT = re.compile(r"MGPU_[A-Z]+__\w+")


def sources() -> list[Json]:
    """The documents as they are written, for where nothing renders them."""
    found: list[Json] = []
    for path in sorted([*MANIFESTS.glob("crds/*.yaml"), *MANIFESTS.glob("base/*.yaml")]):
        found += [
            d
            for d in yaml.load_all(path.read_text(), yaml.CSafeLoader)
            if d and d.get("kind") not in (None, "Kustomization")
        ]
    return found


def check(document: Json) -> None:
    """As an API server with fieldValidation=Strict: no unknown field, no wrong type, nothing required missing."""
    kind = _KINDS.get((document["apiVersion"], document["kind"]))
    model = kind.model if kind else f"V1{document['kind']}"
    assert decode(document, kind or BUILT_IN[0], model)[1] == []
    client.ApiClient().deserialize(json.dumps(document), model, "application/json")


def settings_of(documents: tuple[Json, ...], workload: Json, folder: Path) -> Settings:
    """What the process in the workload runs with: its file, environment and flags."""
    spec = workload["spec"]["template"]["spec"]
    (volume,) = (v for v in spec["volumes"] if v["name"] == "config")
    text = named(documents, "ConfigMap", volume["configMap"]["name"])["data"]["mgpu.yaml"]
    file = folder / "mgpu.yaml"
    file.write_text(text)
    container = running_mgpu(workload)
    block, *arguments = container["args"]
    environ = {
        e["name"]: _value(e)
        for e in container.get("env", ())
        if _ENVIRONMENT.fullmatch(e["name"]) and not _left_to_deploy(e)
    }
    flags = dict(a.split("=", 1) for a in arguments if not a.startswith("--config="))
    snake = {re.sub("([A-Z])", lambda m: "_" + m[1].lower(), _FLAGS[name]): value for name, value in flags.items()}
    return read_settings(file, environ, snake, block)


def _value(variable: Json) -> str:
    return str(variable["value"] if "value" in variable else variable["valueFrom"]["fieldRef"]["fieldPath"])


def _left_to_deploy(variable: Json) -> bool:
    """The ConfigMaps that deploy.sh makes; a kustomization applied without it has none."""
    source = variable.get("valueFrom", {}).get("configMapKeyRef", {})
    return source.get("name") in ("mgpu-api-servers", "mgpu-record-keys") and bool(source["optional"])


def test_what_is_written_is_valid_by_itself() -> None:
    for document in sources():
        check(document)


@EVERYWHERE
def test_an_api_server_would_take_every_document(folder: Path) -> None:
    documents = rendered(folder)
    names = [(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in documents]
    assert len(names) == len(set(names))
    for document in documents:
        if document["apiVersion"] not in _OTHERS:
            check(document)


def test_a_misspelt_field_and_a_missing_one_are_found() -> None:
    (deployment,) = (d for d in sources() if d["metadata"]["name"] == "mgpu-webhook" and d["kind"] == "Deployment")
    with pytest.raises(AssertionError):
        check({**deployment, "spec": {**deployment["spec"], "replcias": 2}})
    with pytest.raises(ValueError, match="selector"):
        check({**deployment, "spec": {k: v for k, v in deployment["spec"].items() if k != "selector"}})


@EVERYWHERE
def test_the_processes_take_their_settings_and_listen_where_they_are_looked_for(folder: Path, tmp_path: Path) -> None:
    documents = rendered(folder)
    for workload in workloads(documents):
        container, name = running_mgpu(workload), workload["metadata"]["name"]
        settings = settings_of(documents, workload, tmp_path)
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        block = name.removeprefix("mgpu-")
        if block == "deviceplugin":
            assert ports == {"metrics": settings.deviceplugin.health_port}
            continue
        own = settings.webhook if block == "webhook" else settings.scheduler
        assert ports.pop("metrics") == own.metrics_port
        assert ports.pop("admission") == own.port
        if ports.pop("extender", None):
            assert settings.scheduler.extender_client_ca
        elif block == "scheduler":
            assert settings.scheduler.extender_host == settings.scheduler.web_host == "127.0.0.1"
        assert not ports
        assert (own.service, own.configuration, own.namespace) == (name, name, "mgpu-system")


@EVERYWHERE
def test_services_lead_to_pods_and_webhooks_to_services(folder: Path) -> None:
    documents = rendered(folder)
    listening: dict[str, set[int]] = {}
    for service in of_kind(documents, "Service"):
        (workload,) = (w for w in workloads(documents) if _chooses(_without_leading(service), w))
        theirs = {p["containerPort"] for c in containers(workload) for p in c.get("ports", ())}
        assert {p["targetPort"] for p in service["spec"]["ports"]} <= theirs
        listening[service["metadata"]["name"]] = {p["port"] for p in service["spec"]["ports"]}
    for configuration in of_kind(documents, "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        for hook in configuration["webhooks"]:
            service = hook["clientConfig"]["service"]
            assert service["port"] in listening[service["name"]]
            if hook["name"] == "claims.mgpu.io":
                assert "namespaceSelector" not in hook, "mgpu's own pods have no claims that could wait for mgpu"
                continue
            (own,) = hook["namespaceSelector"]["matchExpressions"]
            assert own == {
                "key": "kubernetes.io/metadata.name",
                "operator": "NotIn",
                "values": [service["namespace"]],
            }


@EVERYWHERE
def test_everything_named_is_there(folder: Path) -> None:
    documents = rendered(folder)
    accounts = {a["metadata"]["name"] for a in of_kind(documents, "ServiceAccount")}
    maps = {m["metadata"]["name"] for m in of_kind(documents, "ConfigMap")}
    roles = {(r["kind"], r["metadata"].get("namespace"), r["metadata"]["name"]) for r in documents if "rules" in r}
    for workload in workloads(documents):
        spec = workload["spec"]["template"]["spec"]
        assert spec["serviceAccountName"] in accounts
        volumes = {v["name"] for v in spec["volumes"]}
        assert {m["name"] for c in containers(workload) for m in c["volumeMounts"]} == volumes
        named_maps = {v["configMap"]["name"] for v in spec["volumes"] if "configMap" in v}
        assert named_maps <= maps | {"mgpu-extender-clients", "mgpu-api-clients", "mgpu-record-keys"}
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        for term in [*spec["affinity"].get("podAntiAffinity", {}).values()]:
            assert all(t["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels.items() for t in term)
    for chooser in of_kind(documents, "NetworkPolicy", "PodDisruptionBudget"):
        selector = chooser["spec"].get("podSelector") or chooser["spec"].get("selector") or {}
        assert any(_chooses(selector.get("matchLabels", {}), w) for w in workloads(documents))
    for binding in of_kind(documents, "RoleBinding", "ClusterRoleBinding"):
        assert {s["name"] for s in binding["subjects"]} <= accounts
        role, namespace = binding["roleRef"], binding["metadata"].get("namespace")
        ours = (role["kind"], namespace if role["kind"] == "Role" else None, role["name"]) in roles
        assert ours or role["name"].startswith(("system:", "extension-apiserver-"))


def _without_leading(service: Json) -> Json:
    return {label: value for label, value in service["spec"]["selector"].items() if label != LABEL}


def _chooses(labels: Json, workload: Json) -> bool:
    return bool(labels.items() <= workload["spec"]["template"]["metadata"]["labels"].items())


@EVERYWHERE
def test_pods_run_one_image_of_this_version_as_tightly_as_they_can(folder: Path) -> None:
    documents = rendered(folder)
    ours = set()
    for workload in workloads(documents):
        agent = workload["metadata"]["name"] == "mgpu-deviceplugin"
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["nodeSelector"] == {"kubernetes.io/os": "linux"}
        assert pod["securityContext"].get("runAsNonRoot", False) is not agent
        assert workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/version"] == version("mgpu")
        assert pod["priorityClassName"] == ("system-node-critical" if agent else "system-cluster-critical")
        for container in containers(workload):
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"]
            loose = agent and folder.name == "slices"
            assert own.get("privileged", False) is loose
            assert loose or own["capabilities"] == {"drop": ["ALL"]}
            assert loose or own["allowPrivilegeEscalation"] is False
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
        process = running_mgpu(workload)
        ours.add(process["image"])
        assert {"livenessProbe", "readinessProbe", "startupProbe"} <= process.keys()
    (permitted,) = (q["spec"]["scopeSelector"]["matchExpressions"] for q in of_kind(documents, "ResourceQuota"))
    assert {w["spec"]["template"]["spec"]["priorityClassName"] for w in workloads(documents)} == {
        *permitted[0]["values"]
    }
    (image,) = ours
    assert image.rpartition(":")[2] == version("mgpu")
    scheduler = running_mgpu(named(documents, "Deployment", "mgpu-scheduler"))
    (occupy,) = (e["value"] for e in scheduler["env"] if e["name"] == "MGPU_DIALECTS__MTGPU__OCCUPYIMAGE")
    assert occupy == image


@EVERYWHERE
def test_one_replica_stays(folder: Path) -> None:
    documents = rendered(folder)
    deployment = named(documents, "Deployment", "mgpu-scheduler")
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    budgets = {b["metadata"]["name"]: b["spec"] for b in of_kind(documents, "PodDisruptionBudget")}
    held = {name: budget["maxUnavailable"] for name, budget in budgets.items()}
    assert held == {"mgpu-webhook": 1, "mgpu-scheduler": 1}
    for name, budget in budgets.items():
        assert _chooses(budget["selector"]["matchLabels"], named(documents, "Deployment", name))
    waits = int(running_mgpu(deployment)["lifecycle"]["preStop"]["exec"]["command"][1])
    given = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert waits + server._END_SECONDS + server._DRAIN_SECONDS < given


@EVERYWHERE
def test_the_service_leads_to_the_pod_that_the_leader_labels(folder: Path, tmp_path: Path) -> None:
    documents = rendered(folder)
    deployment = named(documents, "Deployment", "mgpu-scheduler")
    service = named(documents, "Service", "mgpu-scheduler")
    assert service["spec"]["selector"][LABEL] == "true"
    assert service["spec"]["publishNotReadyAddresses"], "it decides until it has ended"
    assert _without_leading(service) == dict(pair.split("=") for pair in REPLICAS.split(","))
    assert LABEL not in deployment["spec"]["template"]["metadata"]["labels"]
    assert settings_of(documents, deployment, tmp_path).scheduler.pod_uid == "metadata.uid"


def test_the_agent_sees_of_its_node_what_its_settings_name(tmp_path: Path) -> None:
    documents = rendered(MANIFESTS / "base")
    agent = named(documents, "DaemonSet", "mgpu-deviceplugin")
    own = settings_of(documents, agent, tmp_path).deviceplugin
    mounts = {m["name"]: m["mountPath"] for m in running_mgpu(agent)["volumeMounts"]}
    paths = {v["name"]: v["hostPath"]["path"] for v in agent["spec"]["template"]["spec"]["volumes"] if "hostPath" in v}
    assert paths == {name: path for name, path in mounts.items() if name not in ("config", "record-keys")}
    needed = {f"{own.kubelet_dir}/device-plugins", f"{own.kubelet_dir}/pod-resources", own.cdi_dir}
    needed |= {str(Path(own.cri_socket).parent), str(Path(own.mps_dir).parent), str(visibility.TOOLKIT_CONFIG.parent)}
    assert set(paths.values()) == needed
    assert str(Path(own.limits_dir).parent) in needed


def test_slices_have_what_mps_meets_in() -> None:
    agent = named(rendered(MANIFESTS / "overlays/slices"), "DaemonSet", "mgpu-deviceplugin")
    pod = agent["spec"]["template"]["spec"]
    assert pod["hostPID"]
    mounts = {m["mountPath"]: m["name"] for m in running_mgpu(agent)["volumeMounts"]}
    paths = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
    assert paths[mounts["/dev/shm"]] == "/run/mgpu/mps/shm"
    (shm,) = pod["initContainers"]
    assert shm["volumeMounts"][0]["mountPropagation"] == "Bidirectional"
    # The agent mounts the pipe folders of the cards, and the node's container runtime has to see these mounts.
    (run,) = [m for m in running_mgpu(agent)["volumeMounts"] if m["mountPath"] == "/run/mgpu"]
    assert run["mountPropagation"] == "Bidirectional"
    assert running_mgpu(agent)["securityContext"]["privileged"]
    assert agent["spec"]["updateStrategy"] == {"type": "OnDelete"}


@pytest.mark.parametrize("known", [True, False])
def test_the_shared_memory_of_mps_has_bounds_on_every_kernel(tmp_path: Path, known: bool) -> None:
    agent = named(rendered(MANIFESTS / "overlays/slices"), "DaemonSet", "mgpu-deviceplugin")
    (shm,) = agent["spec"]["template"]["spec"]["initContainers"]
    refuses = "" if known else 'case "$*" in *nosymfollow*) exit 32;; esac; '
    for name, text in {"mount": f'{refuses}echo "$*" >> {tmp_path}/done', "mountpoint": "exit 1", "mkdir": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    subprocess.run(shm["command"], env={"PATH": f"{tmp_path}:/bin"}, check=True)
    bounds = "size=8g,nr_inodes=128k,nosuid,nodev,noexec,mode=1777" + ",nosymfollow" * known
    assert (tmp_path / "done").read_text() == f"-t tmpfs -o {bounds} shm /run/mgpu/mps/shm\n"


@pytest.mark.parametrize("component", ["second-scheduler", "existing-scheduler"])
def test_a_kube_scheduler_asks_about_every_resource(component: str) -> None:
    found = yaml.safe_load((MANIFESTS / "components" / component / "kube-scheduler.yaml").read_text())
    extenders = found["extenders"]
    managed = [{r["name"]: r["ignoredByScheduler"] for r in extender["managedResources"]} for extender in extenders]
    assert managed == [{k: v for k, v in MANAGED.items() if k != MARK}, {MARK: MANAGED[MARK]}]
    assert [extender.pop("ignorable") for extender in extenders] == [False, True]
    for extender in extenders:
        del extender["managedResources"]
    assert extenders[0] == extenders[1], "they are the same server"
    assert (extenders[0]["nodeCacheCapable"], extenders[0]["weight"]) == (True, 5)
    assert {verb: extenders[0][f"{verb}Verb"] for verb in ("filter", "prioritize", "preempt")} == {
        "filter": "filter",
        "prioritize": "prioritize",
        "preempt": "preempt",
    }
    assert found["profiles"][0]["percentageOfNodesToScore"] == 100


def test_the_second_scheduler_has_the_lease_that_mgpu_follows(tmp_path: Path) -> None:
    documents = rendered(MANIFESTS / "overlays/second-scheduler")
    deployment = named(documents, "Deployment", "mgpu-scheduler")
    (sidecar,) = deployment["spec"]["template"]["spec"]["initContainers"]
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("scheduler", "Always")
    in_sync = {"path": "/readyz", "port": 9402}
    assert sidecar["startupProbe"]["httpGet"] == in_sync  # as long as it is not, the kube-scheduler does not start
    (beside,) = deployment["spec"]["template"]["spec"]["containers"]
    assert beside["livenessProbe"]["httpGet"] == in_sync
    assert beside["livenessProbe"]["terminationGracePeriodSeconds"] == 1  # else its preStop hook has its time
    assert beside["lifecycle"]["preStop"]["sleep"]["seconds"] == int(
        sidecar["lifecycle"]["preStop"]["exec"]["command"][1]
    )
    told: Any = yaml.safe_load(
        next(
            m["data"]["kube-scheduler.yaml"]
            for m in of_kind(documents, "ConfigMap")
            if "kube-scheduler.yaml" in m["data"]
        )
    )
    assert told["profiles"][0]["schedulerName"] == "mgpu-scheduler"
    (lease,) = (r for r in named(documents, "Role", "mgpu-kube-scheduler")["rules"])
    assert lease["resourceNames"] == [told["leaderElection"]["resourceName"]]
    assert "get" in lease["verbs"]
    own = settings_of(documents, deployment, tmp_path).scheduler
    assert [own.kube_scheduler_lease] == lease["resourceNames"]
    assert own.namespace == told["leaderElection"]["resourceNamespace"]


def test_the_kube_scheduler_alone_has_the_token_of_its_account() -> None:
    documents = rendered(MANIFESTS / "overlays/second-scheduler")
    secret = named(documents, "Secret", "mgpu-kube-scheduler-token")
    account = named(
        documents, "ServiceAccount", secret["metadata"]["annotations"]["kubernetes.io/service-account.name"]
    )
    assert (account["metadata"]["name"], secret["type"]) == (
        "mgpu-kube-scheduler",
        "kubernetes.io/service-account-token",
    )
    pod = named(documents, "Deployment", "mgpu-scheduler")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "mgpu-scheduler"
    (volume,) = (v for v in pod["volumes"] if v.get("secret", {}).get("secretName") == secret["metadata"]["name"])
    assert {item["key"] for item in volume["secret"]["items"]} == {"token", "ca.crt", "namespace"}
    mounts = {
        container["name"]: mount["mountPath"]
        for container in [*pod["initContainers"], *pod["containers"]]
        for mount in container["volumeMounts"]
        if mount["name"] == volume["name"]
    }
    assert mounts == {"kube-scheduler": "/var/run/secrets/kubernetes.io/serviceaccount"}


def test_certificates_are_made_out_to_the_services_and_injected() -> None:
    documents = rendered(MANIFESTS / "overlays/cert-manager")
    for name in ("mgpu-webhook", "mgpu-scheduler"):
        certificate = named(documents, "Certificate", name)
        assert f"{name}.mgpu-system.svc" in certificate["spec"]["dnsNames"]
        pod = named(documents, "Deployment", name)["spec"]["template"]["spec"]
        (volume,) = (v for v in pod["volumes"] if v["name"] == "tls")
        assert volume["secret"]["secretName"] == certificate["spec"]["secretName"]
        (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "tls")
        assert f"--cert-dir={mount['mountPath']}" in pod["containers"][0]["args"]
    configurations = list(of_kind(documents, "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"))
    for found in configurations:
        given = found["metadata"]["annotations"]["cert-manager.io/inject-ca-from"]
        assert given == f"mgpu-system/{found['metadata']['name'].removeprefix('0-')}"
    assert len(configurations) == 4


def test_all_components_stand_side_by_side(tmp_path: Path) -> None:
    order = sorted(COMPONENTS, key=lambda path: (path.name == "second-scheduler", path.name))
    chosen = [path for path in order if path.name != "nvidia-guarded"]
    documents = rendered(kustomization(tmp_path, MANIFESTS / "base", chosen))
    for document in documents:
        if document["apiVersion"] not in _OTHERS:
            check(document)
    arguments = running_mgpu(named(documents, "Deployment", "mgpu-scheduler"))["args"]
    assert {"--cert-dir=/tls", "--extender-host=0.0.0.0"} <= set(arguments)


def test_where_the_variable_is_not_heeded_the_cards_come_as_mounts(tmp_path: Path) -> None:
    guarded = kustomization(tmp_path, MANIFESTS / "base", [MANIFESTS / "components" / "nvidia-guarded"])
    documents = rendered(guarded)
    agent = named(documents, "DaemonSet", "mgpu-deviceplugin")
    check(agent)
    assert settings_of(documents, agent, tmp_path).deviceplugin.device_list == "mounts"
    own = running_mgpu(agent)["securityContext"]
    assert own["capabilities"] == {"drop": ["ALL"], "add": ["SYS_ADMIN"]}
    assert "allowPrivilegeEscalation" not in own


def test_the_agent_looks_for_device_nodes_in_the_hosts_dev(tmp_path: Path) -> None:
    component = MANIFESTS / "components" / "device-nodes"
    documents = rendered(kustomization(tmp_path, MANIFESTS / "base", [component]))
    agent = named(documents, "DaemonSet", "mgpu-deviceplugin")
    own = settings_of(documents, agent, tmp_path).deviceplugin
    assert own.device_nodes
    (volume,) = (m["name"] for m in running_mgpu(agent)["volumeMounts"] if m["mountPath"] == own.dev_dir)
    paths = {v["name"]: v.get("hostPath") for v in agent["spec"]["template"]["spec"]["volumes"]}
    assert paths[volume] == {"path": "/dev", "type": "Directory"}


def test_measuring_use_adds_the_hosts_process_ids_and_nothing_else(tmp_path: Path) -> None:
    component = MANIFESTS / "components" / "usage"
    before = deepcopy(rendered(MANIFESTS / "base"))  # The documents are rendered once for all tests.
    after = rendered(kustomization(tmp_path, MANIFESTS / "base", [component]))
    agent = named(before, "DaemonSet", "mgpu-deviceplugin")
    assert "hostPID" not in agent["spec"]["template"]["spec"]
    agent["spec"]["template"]["spec"]["hostPID"] = True
    assert before == after


def test_only_the_scheduler_reaches_the_metrics_of_the_agents_for_the_page() -> None:
    documents = tuple(yaml.load_all((MANIFESTS / "base" / "network.yaml").read_text(), yaml.CSafeLoader))
    own = named(documents, "NetworkPolicy", "mgpu-deviceplugin")["spec"]
    (rule,) = own["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "scheduler"
    assert "namespaceSelector" not in peer
    assert [port["port"] for port in rule["ports"]] == [9404]
    assert own["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "deviceplugin"


def test_limits_of_the_driver_add_what_they_need_and_nothing_else(tmp_path: Path) -> None:
    component = MANIFESTS / "components" / "isolation-driver"
    before = deepcopy(rendered(MANIFESTS / "base"))  # The documents are rendered once for all tests.
    after = rendered(kustomization(tmp_path, MANIFESTS / "base", [component]))
    agent = named(before, "DaemonSet", "mgpu-deviceplugin")
    pod, process = agent["spec"]["template"]["spec"], running_mgpu(agent)
    process["securityContext"] = {"privileged": True, "readOnlyRootFilesystem": True}
    process["env"] += [
        {"name": "MGPU_DEVICEPLUGIN__ISOLATION", "value": "driver"},
        {"name": "MGPU_DEVICEPLUGIN__CGROUPDIR", "value": "/host/sys/fs/cgroup"},
    ]
    process["volumeMounts"] += [
        {"name": "cgroup", "mountPath": "/host/sys/fs/cgroup"},
        {"name": "etc-cdi", "mountPath": "/etc/cdi", "readOnly": True},
    ]
    pod["volumes"] += [
        {"name": "cgroup", "hostPath": {"path": "/sys/fs/cgroup", "type": "Directory"}},
        {"name": "etc-cdi", "hostPath": {"path": "/etc/cdi", "type": "DirectoryOrCreate"}},
    ]
    assert before == after
    own = settings_of(after, named(after, "DaemonSet", "mgpu-deviceplugin"), tmp_path).deviceplugin
    assert (own.isolation, own.cgroup_dir) == ("driver", "/host/sys/fs/cgroup")


def test_hami_core_adds_what_it_needs_and_nothing_else(tmp_path: Path) -> None:
    component = MANIFESTS / "components" / "isolation-hami-core"
    before, after = rendered(MANIFESTS / "base"), rendered(kustomization(tmp_path, MANIFESTS / "base", [component]))
    of_hami = deepcopy(named(after, "DaemonSet", "mgpu-deviceplugin"))
    own = settings_of(after, of_hami, tmp_path).deviceplugin
    assert (own.isolation, own.hami_core_dir) == ("hami-core", "/usr/local/vgpu")
    added = running_mgpu(of_hami)
    mounts = {mount["name"]: mount for mount in added["volumeMounts"]}
    assert mounts["run"].pop("mountPropagation") == "Bidirectional"
    assert mounts.pop("vgpu") == {"name": "vgpu", "mountPath": "/usr/local/vgpu", "readOnly": True}
    assert Path(own.hami_core_state_dir).is_relative_to(mounts["run"]["mountPath"])
    volumes = {volume["name"]: volume for volume in of_hami["spec"]["template"]["spec"]["volumes"]}
    assert volumes.pop("vgpu")["hostPath"] == {"path": "/usr/local/vgpu", "type": "DirectoryOrCreate"}
    assert added.pop("securityContext") == {"privileged": True, "readOnlyRootFilesystem": True}
    env = {one["name"]: one for one in added["env"]}
    for name in ("MGPU_DEVICEPLUGIN__ISOLATION", "MGPU_DEVICEPLUGIN__HAMICOREDIR"):
        del env[name]
    agent = named(before, "DaemonSet", "mgpu-deviceplugin")
    process = running_mgpu(agent)
    assert mounts == {mount["name"]: mount for mount in process["volumeMounts"]}
    assert volumes == {volume["name"]: volume for volume in agent["spec"]["template"]["spec"]["volumes"]}
    assert env == {one["name"]: one for one in process["env"]}
    kept = {"volumeMounts", "env", "securityContext"}
    assert {k: v for k, v in added.items() if k not in kept} == {k: v for k, v in process.items() if k not in kept}
    assert [one for one in before if one != agent] == [one for one in after if one["kind"] != "DaemonSet"]


def test_claims_are_enabled_with_the_folders_of_the_driver(tmp_path: Path) -> None:
    documents = rendered(MANIFESTS / "overlays/dra")
    agent = named(documents, "DaemonSet", "mgpu-deviceplugin")
    for workload in (agent, named(documents, "Deployment", "mgpu-scheduler")):
        assert settings_of(documents, workload, tmp_path).dra.enabled
    own = settings_of(documents, agent, tmp_path).deviceplugin
    mounts = {m["name"]: m["mountPath"] for m in running_mgpu(agent)["volumeMounts"]}
    paths = {v["name"]: v["hostPath"]["path"] for v in agent["spec"]["template"]["spec"]["volumes"] if "hostPath" in v}
    assert paths == {name: path for name, path in mounts.items() if name not in ("config", "record-keys")}
    # Not the whole folder `plugins`, where the sockets of other drivers are.
    needed = {str(plugin_folder(Path(own.kubelet_dir))), f"{own.kubelet_dir}/plugins_registry"}
    assert needed <= set(paths.values())
    assert f"{own.kubelet_dir}/plugins" not in paths.values()
    base = named(rendered(MANIFESTS / "base"), "DaemonSet", "mgpu-deviceplugin")
    assert set(mounts) - {m["name"] for m in running_mgpu(base)["volumeMounts"]} == {"dra", "plugins-registry"}
    assert not settings_of(rendered(MANIFESTS / "base"), base, tmp_path).dra.enabled


def test_whole_cards_by_claims_need_a_class_for_their_resource(tmp_path: Path) -> None:
    chosen = [MANIFESTS / "components" / name for name in ("dra", "dra-whole-cards")]
    documents = rendered(kustomization(tmp_path, MANIFESTS / "base", chosen))
    agent = named(documents, "DaemonSet", "mgpu-deviceplugin")
    assert settings_of(documents, agent, tmp_path).deviceplugin.whole_cards == "dra"
    classes = {d["metadata"]["name"]: d["spec"] for d in of_kind(documents, "DeviceClass")}
    assert {name: spec.get("extendedResourceName") for name, spec in classes.items()} == {
        "mgpu": None,
        "mgpu-mig": None,
        "mgpu-whole": "nvidia.com/gpu",
    }
    assert all(DRIVER in spec["selectors"][0]["cel"]["expression"] for spec in classes.values())


@pytest.mark.parametrize("order", [("cert-manager", "dra"), ("dra", "cert-manager")])
def test_cert_manager_injects_the_ca_of_the_scheduler_into_the_webhook_for_claims(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    chosen = [MANIFESTS / "components" / name for name in order]
    documents = rendered(kustomization(tmp_path, MANIFESTS / "base", chosen))
    for name in ("mgpu-claims", "mgpu-scheduler"):
        found = named(documents, "MutatingWebhookConfiguration", name)
        assert found["metadata"]["annotations"]["cert-manager.io/inject-ca-from"] == "mgpu-system/mgpu-scheduler"


def test_nothing_names_a_registry() -> None:
    for folder in FOLDERS:
        for image in re.findall(r"^ *image: (\S+)$", text_of(folder), re.MULTILINE):
            name = image.partition("/")[0] if "/" in image else ""
            assert name in ("", "images.example"), image
    assert len(OVERLAYS) >= 9


def test_under_cert_manager_no_authority_is_made_and_no_right_on_secrets_is_given() -> None:
    documents = rendered(MANIFESTS / "overlays/cert-manager")
    rules = [rule for document in documents for rule in document.get("rules") or () if "verbs" in rule]
    assert not [rule for rule in rules if "secrets" in rule["resources"]]
    assert "--cert-dir=/tls" in json.dumps(documents)
    roles = {(d["metadata"]["namespace"], d["metadata"]["name"]) for d in documents if d["kind"] == "Role"}
    bound = {(d["metadata"]["namespace"], d["roleRef"]["name"]) for d in documents if d["kind"] == "RoleBinding"}
    assert roles - bound == {("mgpu-system", "mgpu-inspect")}, "a role for users, whom administrators choose"
    assert bound <= roles


@EVERYWHERE
def test_no_overlay_lets_a_process_write_a_webhook_configuration_or_create_a_secret(folder: Path) -> None:
    for document in rendered(folder):
        for rule in document.get("rules") or ():
            resources, verbs = rule.get("resources", ()), set(rule.get("verbs", ()))
            assert not [r for r in resources if "webhookconfigurations" in r], json.dumps(document["metadata"])
            if "secrets" in resources:
                assert rule["resourceNames"]
                assert verbs <= {"get", "update"}
