"""manifests/deploy.sh opens the admission endpoints to the API server alone."""

import copy
import subprocess
from pathlib import Path
from typing import Any

import yaml

from mgpu.kube import Api
from tests.manifests.conftest import Run
from tests.manifests.rendered import MANIFESTS, OWN_CERTIFICATES, Json, kustomization, named, of_kind, rendered

_NAMESPACE = "namespaces/mgpu-system"
_SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
_VARIABLES = {"mgpu-webhook": "MGPU_WEBHOOK__APISERVERS", "mgpu-scheduler": "MGPU_SCHEDULER__APISERVERS"}


def deploy(run: Run, folder: Path, settings: str = OWN_CERTIFICATES, **env: str) -> "subprocess.CompletedProcess[str]":
    folder.mkdir(exist_ok=True)
    (folder / "base.yaml").write_text(yaml.dump_all(lean(settings), Dumper=yaml.CSafeDumper))
    return run(MANIFESTS / "deploy.sh", kustomization(folder, folder / "base.yaml"), env={"WAIT": "0", **env})


def lean(settings: str) -> list[Json]:
    """Return what of the base says who may call. The scheduler mounts no record key, so deploy.sh makes none."""
    kinds = ("Namespace", "ConfigMap", "Deployment", "NetworkPolicy")
    chosen = tuple(copy.deepcopy(d) for d in of_kind(rendered(MANIFESTS / "base"), *kinds))
    (config,) = (d for d in of_kind(chosen, "ConfigMap") if "mgpu.yaml" in d.get("data", {}))
    config["data"]["mgpu.yaml"] = settings
    spec = named(chosen, "Deployment", "mgpu-scheduler")["spec"]["template"]["spec"]
    spec["volumes"], spec["containers"][0]["volumeMounts"] = [], []
    return list(chosen)


def admitted(api: Api) -> dict[str, Any]:
    """Return the data of the ConfigMap to which both Deployments refer."""
    names = set()
    for deployment, variable in _VARIABLES.items():
        spec = api.get(f"/apis/apps/v1/{_NAMESPACE}/deployments/{deployment}")["spec"]["template"]["spec"]
        (entry,) = (e for c in spec["containers"] for e in c.get("env", ()) if e["name"] == variable)
        names.add(entry["valueFrom"]["configMapKeyRef"]["name"])
    (name,) = names
    return dict(api.get(f"/api/v1/{_NAMESPACE}/configmaps/{name}")["data"])


def service(api: Api, *addresses: str) -> None:
    """Set the EndpointSlice of the Service `kubernetes`, which a cluster's API servers write themselves."""
    labels = {"kubernetes.io/service-name": "kubernetes"}
    body = {
        "metadata": {"name": "kubernetes", "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address]} for address in addresses],
    }
    if api.list(_SLICES)[0]:
        api.delete(f"{_SLICES}/kubernetes")
    api.create(_SLICES, body)


def test_without_any_address_nothing_is_applied(run: Run, tmp_path: Path) -> None:
    done = deploy(run, tmp_path)
    assert done.returncode == 2
    assert "names no addresses of API servers: set API_SERVERS" in done.stderr


def test_the_addresses_of_the_service_are_found_given_ones_are_kept(run: Run, api: Api, tmp_path: Path) -> None:
    service(api, "192.0.2.11", "192.0.2.12")
    done = deploy(run, tmp_path / "1")
    assert done.returncode == 0, done.stderr
    assert admitted(api) == {"apiServers": "192.0.2.11,192.0.2.12", "givenBy": "detection"}

    service(api, "192.0.2.13")
    assert deploy(run, tmp_path / "2").returncode == 0
    assert admitted(api)["apiServers"] == "192.0.2.13"

    assert deploy(run, tmp_path / "3", API_SERVERS="192.0.2.0/28,2001:db8::1").returncode == 0
    assert admitted(api)["apiServers"] == "192.0.2.0/28,2001:db8::1"

    done = deploy(run, tmp_path / "4", NARROW_NETWORK="yes")
    assert done.returncode == 0, done.stderr
    assert admitted(api) == {"apiServers": "192.0.2.0/28,2001:db8::1", "givenBy": "hand"}
    for name in _VARIABLES:
        (rule,) = api.get(f"/apis/networking.k8s.io/v1/{_NAMESPACE}/networkpolicies/{name}")["spec"]["ingress"]
        assert [source["ipBlock"]["cidr"] for source in rule["from"]] == ["192.0.2.0/28", "2001:db8::1/128"]


def test_an_overlay_that_says_who_may_call_is_left_alone(run: Run, tmp_path: Path) -> None:
    """The environment overrides settings, so none is set."""
    own = "webhook: {apiServers: [192.0.2.1], certDir: /tls}\nscheduler: {apiServers: [192.0.2.1], certDir: /tls}\n"
    done = deploy(run, tmp_path, own)
    assert done.returncode == 0, done.stderr
    assert "the admission endpoints admit" not in done.stdout
