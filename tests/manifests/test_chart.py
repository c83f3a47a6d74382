"""The Helm chart makes the same objects as the kustomization, and refuses wrong values."""

import base64
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from mgpu.kube import Api, ApiError
from mgpu.model.record_seals import key_id
from mgpu.serving.certificates import Authority, renew_if_due
from mgpu.serving.record_keys import read_public_keys
from mgpu.settings import Settings
from tests.manifests.conftest import Run
from tests.manifests.helm import CHART, KUBERNETES, WITHOUT_CLUSTER, helm, merged, objects, template
from tests.manifests.rendered import (
    COMPONENTS,
    MANIFESTS,
    OVERLAYS,
    Json,
    containers,
    kustomization,
    named,
    of_kind,
    rendered,
    workloads,
)
from tests.manifests.test_rendered import check, settings_of

IMAGES: Json = {
    "image": {"repository": "mgpu"},
    "secondScheduler": {"image": {"repository": "kube-scheduler"}},
}
"""The names of the images in the base. The chart has placeholders with a registry, as the overlay `example`."""
ONE_VOCABULARY: Json = {name: {"enabled": False} for name in ("mgpu", "gpushare", "koordinator", "slices", "mtgpu")}
SECOND: Json = {"secondScheduler": {"enabled": True}}

OF_OVERLAYS: dict[str, Json] = {
    "cert-manager": {"certificates": {"mode": "cert-manager"}},
    "dra": {"dra": {"enabled": True}},
    "example": {
        "certificates": {"mode": "cert-manager"},
        "devicePlugin": {"runtimeClassName": "nvidia"},
        "secondScheduler": {"enabled": True, "image": {"repository": "images.example/kube-scheduler"}},
        "image": {"repository": "images.example/mgpu"},
    },
    "existing-scheduler": {"existingScheduler": {"enabled": True}},
    "gpushare-mib": {
        "vocabularies": merged(ONE_VOCABULARY, {"gpushare": {"enabled": True, "memoryUnit": "MiB"}}),
    },
    "koordinator-takeover": {
        **SECOND,
        "vocabularies": merged(ONE_VOCABULARY, {"koordinator": {"enabled": True}}),
        "settings": {"scheduler": {"bindingUsers": ["system:serviceaccount:mgpu-system:mgpu-kube-scheduler"]}},
    },
    "mgpu-only": {
        "vocabularies": merged(
            ONE_VOCABULARY, {"mgpu": {"enabled": True, "MGPUPolicy": "binpack", "MGPUMaxContainersPerCard": 16}}
        ),
    },
    "mtgpu-only": {
        "vocabularies": merged(ONE_VOCABULARY, {"mtgpu": {"enabled": True}, "koordinator": {"enabled": True}}),
    },
    "second-scheduler": SECOND,
    "slices": {
        "slices": {"enabled": True},
        "devicePlugin": {"isolation": "mps"},
        "vocabularies": merged(
            ONE_VOCABULARY,
            {"slices": {"enabled": True, "schedulePolicy": "binpack"}, "koordinator": {"enabled": True}},
        ),
    },
}
"""The values that correspond to each overlay."""

ASSIGNS_NOTHING: Json = {"secondScheduler": {"enabled": True, "assignPods": False}}
"""The component alone; the overlay assigns the pods, by its settings."""
DRA: Json = {"dra": {"enabled": True}}
ALL_AT_ONCE = (
    *("cert-manager", "client-certificates", "device-nodes", "existing-scheduler", "isolation-driver", "volcano"),
    *("nvidia-runtime", "usage", "dra", "dra-whole-cards", "dra-convert", "slices", "second-scheduler"),
)
OF_COMPONENTS: dict[str, tuple[Sequence[str], Json]] = {
    "cert-manager": (["cert-manager"], {"certificates": {"mode": "cert-manager"}}),
    "client-certificates": (["client-certificates"], {"apiServers": {"clientCertificates": {"enabled": True}}}),
    "device-nodes": (["device-nodes"], {"devicePlugin": {"deviceNodes": True}}),
    "dra": (["dra"], DRA),
    "dra-convert": (["dra", "dra-convert"], merged(DRA, {"dra": {"convert": True}})),
    "dra-whole-cards": (["dra", "dra-whole-cards"], merged(DRA, {"dra": {"wholeCards": True}})),
    "existing-scheduler": (["existing-scheduler"], {"existingScheduler": {"enabled": True}}),
    "isolation-driver": (["isolation-driver"], {"devicePlugin": {"isolation": "driver"}}),
    "isolation-hami-core": (["isolation-hami-core"], {"devicePlugin": {"isolation": "hami-core"}}),
    "nvidia-guarded": (["nvidia-guarded"], {"devicePlugin": {"nvidiaGuarded": True}}),
    "nvidia-runtime": (["nvidia-runtime"], {"devicePlugin": {"runtimeClassName": "nvidia"}}),
    "second-scheduler": (["second-scheduler"], ASSIGNS_NOTHING),
    "slices": (["slices"], {"slices": {"enabled": True, "migManager": False}}),
    "usage": (["usage"], {"devicePlugin": {"measureUsage": True}}),
    "volcano": (["volcano"], {"volcano": {"enabled": True}}),
    "many": (
        ALL_AT_ONCE,
        {
            "certificates": {"mode": "cert-manager"},
            "apiServers": {"clientCertificates": {"enabled": True}},
            "existingScheduler": {"enabled": True},
            "volcano": {"enabled": True},
            "dra": {"enabled": True, "wholeCards": True, "convert": True},
            "slices": {"enabled": True, "migManager": False},
            "devicePlugin": {
                "isolation": "driver",
                "deviceNodes": True,
                "runtimeClassName": "nvidia",
                "measureUsage": True,
            },
            **ASSIGNS_NOTHING,
        },
    ),
}
"""The values that correspond to each component, and those with which they must be combined."""
MONITORING: Json = {
    "monitoring": {"podMonitor": {"enabled": True}, "rules": {"enabled": True}, "dashboard": {"enabled": True}}
}

# What may differ between the chart and the kustomization. docs/chart.md has the same list.
_LABELS = {f"app.kubernetes.io/{name}" for name in ("name", "part-of", "version", "instance", "managed-by")}
_LABELS |= {"helm.sh/chart"}
"""Labels of objects (not of pods) that the chart may add."""
_HASH = re.compile(r"-[0-9a-z]{10}$")
"""kustomize's suffix of ConfigMaps with settings. The chart has an annotation of the pods with a checksum instead."""


def normalised(documents: Iterable[Json]) -> dict[tuple[str, str, str], Json]:
    """Return the objects by kind, namespace and name, without the differences that are allowed."""
    found: dict[tuple[str, str, str], Json] = {}
    hashed = {
        d["metadata"]["name"] for d in documents if d["kind"] == "ConfigMap" and _HASH.search(d["metadata"]["name"])
    }
    for original in documents:
        if original["kind"] == "Namespace":
            continue  # Helm's --create-namespace creates it, and docs/install.md has the command for its labels.
        document = _renamed(deepcopy(original), hashed)
        metadata = document["metadata"]
        metadata["labels"] = {k: v for k, v in metadata.get("labels", {}).items() if k not in _LABELS}
        annotations = metadata.get("annotations", {})
        annotations.pop("helm.sh/resource-policy", None)
        metadata["annotations"] = annotations
        if "mgpu.yaml" in document.get("data", {}):
            document["data"]["mgpu.yaml"] = yaml.safe_load(document["data"]["mgpu.yaml"])
        if document["kind"] in ("Deployment", "DaemonSet"):
            _normalise_pods(document)
        key = (document["kind"], metadata.get("namespace", ""), metadata["name"])
        assert key not in found
        found[key] = document
    return found


def _renamed(value: Any, hashed: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(inner, hashed) for key, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(inner, hashed) for inner in value]
    return _HASH.sub("", value) if isinstance(value, str) and value in hashed else value


def _normalise_pods(workload: Json) -> None:
    pod = workload["spec"]["template"]
    annotations = pod["metadata"].pop("annotations", {})
    assert all(name.startswith("checksum/") for name in annotations)
    pod["spec"]["volumes"].sort(key=_name)
    for container in containers(workload):
        assert container.pop("imagePullPolicy", "IfNotPresent") == "IfNotPresent"  # The default of Kubernetes.
        assert "$(" not in json.dumps(container.get("env", [])), "the order of the variables matters"
        container.get("env", []).sort(key=_name)
        container["volumeMounts"].sort(key=_name)
        container.get("ports", []).sort(key=_name)
        container["args"] = [*container.get("args", [])[:1], *sorted(container.get("args", [])[1:])]


def _name(entry: Json) -> str:
    return str(entry["name"])


def assert_same(chart: Sequence[Json], overlay: Sequence[Json]) -> None:
    ours, theirs = normalised(chart), normalised(overlay)
    assert set(ours) == set(theirs)
    for key in theirs:
        # As lines, because pytest shows which of them differ.
        assert yaml.safe_dump(ours[key]).splitlines() == yaml.safe_dump(theirs[key]).splitlines(), key


def test_the_base_and_the_default_values_are_the_same_objects(tmp_path: Path) -> None:
    assert_same(objects(tmp_path, IMAGES), rendered(MANIFESTS / "base"))


@pytest.mark.parametrize("overlay", OVERLAYS, ids=[overlay.name for overlay in OVERLAYS])
def test_each_overlay_has_values_that_make_the_same_objects(overlay: Path, tmp_path: Path) -> None:
    values = merged(IMAGES, OF_OVERLAYS[overlay.name])
    documents = objects(tmp_path, _with_first_defaults(values, overlay))
    if overlay.name in ("example", "second-scheduler"):
        # Their settings are files of their own without the vocabularies, whose defaults are the same.
        data = named(documents, "ConfigMap", "mgpu-config")["data"]
        settings = yaml.safe_load(data["mgpu.yaml"])
        del settings["dialects"]
        data["mgpu.yaml"] = yaml.safe_dump(settings)
    assert_same(documents, rendered(overlay))


def _with_first_defaults(values: Json, overlay: Path) -> Json:
    """Return values without the default of a setting that the overlay does not name (`memoryUnit`)."""
    file = overlay / "mgpu.yaml"
    if not file.exists() or "memoryUnit" in file.read_text():
        return values
    return merged(values, {"vocabularies": {"gpushare": {"memoryUnit": None}}})


@pytest.mark.parametrize("name", OF_COMPONENTS)
def test_each_component_has_values_that_make_the_same_objects(name: str, tmp_path: Path) -> None:
    chosen, values = OF_COMPONENTS[name]
    folder = kustomization(tmp_path, MANIFESTS / "base", [MANIFESTS / "components" / part for part in chosen])
    assert_same(objects(tmp_path, merged(IMAGES, values)), rendered(folder))


def test_monitoring_has_values_that_make_the_same_objects(tmp_path: Path) -> None:
    folder = kustomization(tmp_path, MANIFESTS / "base", [MANIFESTS / "monitoring"])
    assert_same(objects(tmp_path, merged(IMAGES, MONITORING)), rendered(folder))


def test_no_overlay_and_no_component_is_left_out() -> None:
    assert set(OF_OVERLAYS) == {overlay.name for overlay in OVERLAYS}
    assert set(OF_COMPONENTS) - {"many"} == {component.name for component in COMPONENTS}


EVERYTHING: Json = merged(
    OF_COMPONENTS["many"][1],
    merged(MONITORING, {"secondScheduler": {"assignPods": True}, "networkPolicy": {"narrow": True}}),
)
ADDRESSES: Json = {"apiServers": {"addresses": ["192.0.2.1", "192.0.2.64/28", "2001:db8::5"]}}
MATRIX: dict[str, Json] = {
    "default": {},
    "everything": merged(EVERYTHING, ADDRESSES),
    "existing certificates": {
        "certificates": {
            "mode": "existing",
            "existing": {name: {"secretName": f"own-{name}", "caBundle": "PEM"} for name in ("webhook", "scheduler")},
        }
    },
    "nothing optional": {
        **{name: {"enabled": False} for name in ("networkPolicy", "podDisruptionBudget", "resourceQuota", "doctor")},
        "crds": {"install": False},
    },
    "pods": {
        name: {
            "podAnnotations": {"a": "b"},
            "podLabels": {"team": "gpu"},
            "extraArgs": ["--log-level=debug"],
            "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example"}],
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
            "tolerations": [],
            "nodeSelector": {"zone": "a"},
            "priorityClassName": "",
            "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        }
        for name in ("webhook", "scheduler", "devicePlugin")
    },
    "folders": {"devicePlugin": {"kubeletDir": "/data/kubelet", "runtimeDir": "/var/run/crio"}, **DRA},
}


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
@pytest.mark.parametrize("namespace", ["mgpu-system", "gpus"])
def test_an_api_server_would_take_every_object_in_any_namespace(values: Json, namespace: str, tmp_path: Path) -> None:
    documents = objects(tmp_path, values, namespace=namespace)
    if namespace != "mgpu-system":
        assert "mgpu-system" not in json.dumps(documents)
    for document in documents:
        if document["apiVersion"] not in ("cert-manager.io/v1", "monitoring.coreos.com/v1"):
            check(document)
    for workload in workloads(documents):
        for container in containers(workload):
            # A flag that is no setting.
            container["args"] = [a for a in container.get("args", ()) if not a.startswith("--log-level")]
        own = settings_of(documents, workload, tmp_path)
        assert (own.webhook.namespace, own.scheduler.namespace) == (namespace, namespace)
        assert own.dialects.slices.config_map_namespace == namespace


def test_values_of_pods_reach_them(tmp_path: Path) -> None:
    for workload in workloads(objects(tmp_path, MATRIX["pods"])):
        pod = workload["spec"]["template"]
        assert pod["metadata"]["annotations"]["a"] == "b"
        assert pod["metadata"]["labels"]["team"] == "gpu"
        assert pod["spec"]["nodeSelector"]["zone"] == "a"
        assert "tolerations" not in pod["spec"]
        assert "priorityClassName" not in pod["spec"]
        assert "podAntiAffinity" not in pod["spec"]["affinity"]
        (container,) = pod["spec"]["containers"]
        assert container["args"][-1] == "--log-level=debug"
        assert container["env"][-1]["name"] == "HTTPS_PROXY"
        assert container["volumeMounts"][-1] == {"name": "more", "mountPath": "/more"}
        assert pod["spec"]["volumes"][-1] == {"name": "more", "emptyDir": {}}


def test_images_are_named_by_tag_or_by_digest_and_pulled_with_the_secrets(tmp_path: Path) -> None:
    digest = "sha256:" + "0" * 64
    values = {
        "image": {"repository": "images.example/own", "digest": digest},
        "imagePullSecrets": [{"name": "pull"}],
        "secondScheduler": {"enabled": True, "image": {"tag": "v1.36.9"}},
    }
    documents = objects(tmp_path, values)
    found = {c["image"] for workload in workloads(documents) for c in containers(workload)}
    assert found == {f"images.example/own@{digest}", "images.example/kube-scheduler:v1.36.9"}
    assert all(w["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "pull"}] for w in workloads(documents))
    scheduler = named(documents, "Deployment", "mgpu-scheduler")["spec"]["template"]["spec"]
    (occupy,) = (e for e in scheduler["initContainers"][0]["env"] if e["name"].endswith("OCCUPYIMAGE"))
    assert occupy["value"] == f"images.example/own@{digest}"


def test_the_kube_scheduler_has_the_version_of_the_cluster(tmp_path: Path) -> None:
    done = template(tmp_path, merged(WITHOUT_CLUSTER, SECOND), "--kube-version", "v1.34.2-gke.100")
    assert "image: images.example/kube-scheduler:v1.34.2\n" in done.stdout, done.stderr


def test_a_change_of_the_settings_replaces_all_pods_and_a_change_of_the_callers_those_that_are_called(
    tmp_path: Path,
) -> None:
    before = _annotations(objects(tmp_path, {}))
    settings = _annotations(objects(tmp_path, {"settings": {"nodePolicy": "spread"}}))
    callers = _annotations(objects(tmp_path, ADDRESSES))
    assert {name for name in before if before[name] != settings[name]} == set(before)
    assert {name for name in before if before[name] != callers[name]} == {"mgpu-webhook", "mgpu-scheduler"}


def _annotations(documents: tuple[Json, ...]) -> dict[str, Json]:
    return {w["metadata"]["name"]: w["spec"]["template"]["metadata"]["annotations"] for w in workloads(documents)}


def test_settings_have_precedence_over_other_values(tmp_path: Path) -> None:
    given = {"webhook": {"schedulerName": "mine"}, "dialects": {"gpushare": {"memoryUnit": "MiB"}}}
    documents = objects(tmp_path, {**SECOND, "settings": given})
    settings = yaml.safe_load(named(documents, "ConfigMap", "mgpu-config")["data"]["mgpu.yaml"])
    assert settings["webhook"]["schedulerName"] == "mine"
    assert settings["dialects"]["gpushare"] == {"enabled": True, "memoryUnit": "MiB"}


def test_the_addresses_of_the_api_servers_reach_the_processes_and_the_network_policies(tmp_path: Path) -> None:
    documents = objects(tmp_path, merged(ADDRESSES, {"networkPolicy": {"narrow": True}}))
    data = named(documents, "ConfigMap", "mgpu-api-servers")["data"]
    assert data == {"apiServers": "192.0.2.1,192.0.2.64/28,2001:db8::5", "givenBy": "hand"}
    for name in ("mgpu-webhook", "mgpu-scheduler"):
        (rule,) = named(documents, "NetworkPolicy", name)["spec"]["ingress"]
        blocks = [peer["ipBlock"]["cidr"] for peer in rule["from"]]
        assert blocks == ["192.0.2.1/32", "192.0.2.64/28", "2001:db8::5/128"]


def test_certificates_of_the_user_are_mounted_and_trusted(tmp_path: Path) -> None:
    documents = objects(tmp_path, MATRIX["existing certificates"])
    for process in ("webhook", "scheduler"):
        spec = named(documents, "Deployment", f"mgpu-{process}")["spec"]["template"]["spec"]
        (volume,) = (v for v in spec["volumes"] if v["name"] == "tls")
        assert volume["secret"]["secretName"] == f"own-{process}"
        assert "--cert-dir=/tls" in spec["containers"][0]["args"]
    for found in of_kind(documents, "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        assert {base64.b64decode(hook["clientConfig"]["caBundle"]) for hook in found["webhooks"]} == {b"PEM"}


WRONG: dict[str, tuple[Json, str]] = {
    "a name that does not exist": ({"webhook": {"replicas": 3}}, "'/webhook': additional properties 'replicas'"),
    "a block that does not exist": ({"deviceplugin": {}}, "additional properties 'deviceplugin'"),
    "a number as text": ({"scheduler": {"replicaCount": "two"}}, "'/scheduler/replicaCount': got string, want integer"),
    "no replicas": ({"webhook": {"replicaCount": 0}}, "'/webhook/replicaCount': minimum"),
    "a digest without its kind": ({"image": {"digest": "abc"}}, "'/image/digest'"),
    "a tag in the repository's place": ({"image": {"tag": "a b"}}, "'/image/tag'"),
    "a host as address": ({"apiServers": {"addresses": ["api.example"]}}, "'/apiServers/addresses/0'"),
    "one address": ({"apiServers": {"addresses": "192.0.2.1"}}, "'/apiServers/addresses': got string, want array"),
    "an unknown back end": (
        {"devicePlugin": {"isolation": "cgroup"}},
        "'/devicePlugin/isolation': value must be one of",
    ),
    "an unknown mode": ({"certificates": {"mode": "helm"}}, "'/certificates/mode': value must be one of"),
    "a vocabulary that does not exist": ({"vocabularies": {"hami": {"enabled": True}}}, "'/vocabularies'"),
    "a secret that is no object": ({"imagePullSecrets": ["pull"]}, "'/imagePullSecrets/0': got string, want object"),
    "an unknown unit": ({"vocabularies": {"gpushare": {"memoryUnit": "GB"}}}, "'/vocabularies/gpushare/memoryUnit'"),
    "a block of settings that does not exist": (
        {"settings": {"devicePlugin": {}}},
        "'/settings': additional properties",
    ),
    "mps without slices": ({"devicePlugin": {"isolation": "mps"}}, "needs slices.enabled=true"),
    "guarded and privileged": (
        {"devicePlugin": {"nvidiaGuarded": True}, "slices": {"enabled": True}},
        "deviceList=mounts",
    ),
    "converted pods without claims": ({"dra": {"convert": True}}, "need dra.enabled=true"),
    "dry runs where mgpu is": ({"doctor": {"tryIn": "mgpu-system"}}, "must not be the namespace of the release"),
    "no names of Secrets": (
        {"certificates": {"mode": "existing"}},
        "certificates.existing.webhook.secretName is required",
    ),
    "narrow without addresses": ({"networkPolicy": {"narrow": True}}, "narrow needs apiServers.addresses"),
}


@pytest.mark.parametrize(("values", "message"), WRONG.values(), ids=WRONG)
def test_wrong_values_are_refused_with_their_name(values: Json, message: str, tmp_path: Path) -> None:
    done = template(tmp_path, merged(WITHOUT_CLUSTER, values))
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"certificates": {"mode": "generate"}}, "certificates.mode=generate needs a cluster"),
        ({"recordKeys": {"create": True}}, "recordKeys.create needs a cluster"),
        ({"apiServers": {"detect": True}}, "set apiServers.addresses"),
    ],
)
def test_without_a_cluster_nothing_is_made_that_must_be_kept(values: Json, message: str, tmp_path: Path) -> None:
    done = template(tmp_path, merged(WITHOUT_CLUSTER, values))
    assert done.returncode == 1
    assert message in done.stderr


def test_no_addresses_are_needed_where_the_settings_name_the_callers(tmp_path: Path) -> None:
    values = {"apiServers": {"detect": True}, "settings": {"webhook": {"apiServers": "192.0.2.1"}}}
    assert not [d for d in objects(tmp_path, values) if d["metadata"]["name"] == "mgpu-api-servers"]


def test_the_schema_has_the_names_of_the_settings() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    names = {field.alias or name for name, field in Settings.model_fields.items()}
    assert set(schema["definitions"]["settings"]["properties"]) == names - {"cardPolicyFlag"}


def test_helm_finds_nothing_wrong(tmp_path: Path) -> None:
    for values in ({}, MATRIX["everything"]):
        file = tmp_path / "values.json"
        file.write_text(json.dumps(values))
        done = helm("lint", CHART, "--strict", "-n", "mgpu-system", "-f", file, "--kube-version", KUBERNETES)
        assert done.returncode == 0, done.stdout


def from_cluster(kubeconfig: Path, namespace: str = "mgpu-system") -> list[Json]:
    """Render the chart with what the cluster has."""
    done = helm(
        *("template", "mgpu", CHART, "-n", namespace, "--dry-run=server", "--kube-version", KUBERNETES),
        *("--set", "apiServers.addresses={192.0.2.1}"),
        env={"KUBECONFIG": str(kubeconfig)},
    )
    assert done.returncode == 0, done.stderr
    return [d for d in yaml.load_all(done.stdout, yaml.CSafeLoader) if d]


def _bundles(documents: Iterable[Json]) -> Iterator[tuple[str, str]]:
    """Yield the process and the CA bundle of each webhook."""
    for found in documents:
        for hook in found.get("webhooks", ()):
            yield hook["clientConfig"]["service"]["name"], hook["clientConfig"].get("caBundle", "")


def _data(secret: Json) -> dict[str, bytes]:
    return {name: base64.b64decode(text) for name, text in secret["data"].items()}


def test_the_chart_makes_authorities_and_keys_that_the_processes_read_and_keeps_them(
    kubeconfig: Path, api: Api
) -> None:
    documents = tuple(from_cluster(kubeconfig))
    for process in ("mgpu-webhook", "mgpu-scheduler"):
        secret = named(documents, "Secret", f"{process}-tls")
        assert secret["metadata"]["annotations"] == {"helm.sh/hook": "pre-install,pre-upgrade"}
        served = renew_if_due(_data(secret), {f"{process}.mgpu-system.svc"}, datetime.now(UTC), Authority.GIVEN)
        assert served["tls.crt"]
        assert {bundle for name, bundle in _bundles(documents) if name == process} == {secret["data"]["ca.crt"]}
    private = load_pem_private_key(_data(named(documents, "Secret", "mgpu-record-key"))["signing.pem"], None)
    assert isinstance(private, Ed25519PrivateKey)
    keys = named(documents, "ConfigMap", "mgpu-record-keys")
    identifier = key_id(private.public_key())
    assert f"{identifier}.pem" in keys["data"]
    public = read_public_keys("mgpu-record-keys", keys["data"])
    assert public is not None
    assert dict(public.public) == {identifier: private.public_key()}
    with suppress(ApiError):  # The playground has it.
        api.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "mgpu-system"}})
    made = [d for d in documents if "helm.sh/hook" in d["metadata"].get("annotations", {})]
    for document in made:
        if document["kind"] in ("Secret", "ConfigMap"):
            api.create(f"/api/v1/namespaces/mgpu-system/{document['kind'].lower()}s", document)
    again = from_cluster(kubeconfig)
    assert not [
        d for d in again if d["metadata"]["name"] in ("mgpu-record-key", "mgpu-record-keys", "mgpu-webhook-tls")
    ]
    assert list(_bundles(again)) == list(_bundles(documents))


def test_the_chart_keeps_what_the_scripts_have_made_in_any_namespace(kubeconfig: Path, api: Api, run: Run) -> None:
    api.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gpus"}})
    for script in ("certificates.sh", "record-keys.sh"):
        done = run(MANIFESTS / script, env={"MGPU_NAMESPACE": "gpus"})
        assert done.returncode == 0, done.stderr
    documents = from_cluster(kubeconfig, "gpus")
    assert not [d for d in documents if d["kind"] == "Secret"]
    for process, bundle in _bundles(documents):
        assert bundle == api.get(f"/api/v1/namespaces/gpus/secrets/{process}-tls")["data"]["ca.crt"]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the modules of the program that generates the templates importable, which are in no package."""
    monkeypatch.syspath_prepend(MANIFESTS / "chart")


@pytest.mark.usefixtures("program")
def test_the_generated_files_are_up_to_date_and_every_value_is_described() -> None:
    assert import_module("generate").main(["--check"]) == 0


@pytest.mark.usefixtures("program")
def test_a_value_without_a_description_or_a_schema_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("value_table")
    (tmp_path / "values.schema.json").write_text((CHART / "values.schema.json").read_text())
    text = (CHART / "values.yaml").read_text()
    text = text.replace("  # The digest (sha256:…), which has precedence over the tag.\n", "", 1)
    (tmp_path / "values.yaml").write_text(text + "\n# Something new.\nnovelty: 1\n")
    monkeypatch.setattr(module, "CHART", tmp_path)
    assert module.problems() == [
        "values.yaml has no comment for image.digest",
        "values.schema.json does not allow novelty",
    ]


def test_namespace_of_the_dry_runs_is_one_argument(tmp_path: Path) -> None:
    """It could add arguments and fields to the Pod of the test."""
    name = "a, b]\n      command: [c"
    values = tmp_path / "values.json"
    values.write_text(json.dumps(merged(WITHOUT_CLUSTER, {"doctor": {"tryIn": name}})))
    file = "templates/tests/doctor.yaml"
    done = helm("template", "mgpu", CHART, "-f", values, "--kube-version", KUBERNETES, "-s", file, "-n", "mgpu-system")
    (pod,) = [one for one in yaml.safe_load_all(done.stdout) if one and one["kind"] == "Pod"]
    (container,) = pod["spec"]["containers"]
    assert container["args"] == ["doctor", "--namespace=mgpu-system", f"--try-in={name}"]
    assert "command" not in container
