"""manifests/deploy.sh opens the admission endpoints to the API server alone."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.manifests.conftest import Run
from tests.manifests.rendered import MANIFESTS, WITHOUT_POLICIES, kustomization

_OWN_CERTIFICATES = "webhook: {certDir: /tls}\nscheduler: {certDir: /tls}\n"
"""Settings under which deploy.sh makes no authorities, which takes half the time; test_certificates.py tests those."""
_VARIABLES = {"mgpu-webhook": "MGPU_WEBHOOK__APISERVERS", "mgpu-scheduler": "MGPU_SCHEDULER__APISERVERS"}


def deploy(run: Run, folder: Path, settings: str = _OWN_CERTIFICATES, **env: str) -> "subprocess.CompletedProcess[str]":
    folder.mkdir(exist_ok=True)
    replaced = json.dumps([{"op": "replace", "path": "/data/mgpu.yaml", "value": settings}])
    patch = {"target": {"kind": "ConfigMap", "name": "mgpu-config"}, "patch": replaced}
    own = kustomization(folder, MANIFESTS / "base", patches=[WITHOUT_POLICIES, patch])
    return run(MANIFESTS / "deploy.sh", own, env={"WAIT": "0", **env})


def admitted(run: Run) -> dict[str, Any]:
    """Return the data of the ConfigMap to which both Deployments refer."""
    names = set()
    for deployment, variable in _VARIABLES.items():
        found = json.loads(run("kubectl", "-n", "mgpu-system", "get", "deployment", deployment, "-o", "json").stdout)
        spec = found["spec"]["template"]["spec"]
        (entry,) = (e for c in spec["containers"] for e in c.get("env", ()) if e["name"] == variable)
        names.add(entry["valueFrom"]["configMapKeyRef"]["name"])
    (name,) = names
    data = json.loads(run("kubectl", "-n", "mgpu-system", "get", "configmap", name, "-o", "json").stdout)["data"]
    return dict(data)


def service(run: Run, *addresses: str) -> None:
    """Apply the EndpointSlice of the Service `kubernetes`, which a cluster's API servers write themselves."""
    labels = {"kubernetes.io/service-name": "kubernetes"}
    body = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "kubernetes", "namespace": "default", "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address]} for address in addresses],
    }
    done = run("kubectl", "apply", "--server-side", "--force-conflicts", "-f", "-", given=json.dumps(body))
    assert done.returncode == 0, done.stderr


def test_without_any_address_nothing_is_applied(run: Run, tmp_path: Path) -> None:
    done = deploy(run, tmp_path)
    assert done.returncode == 2
    assert "names no addresses of API servers: set API_SERVERS" in done.stderr


def test_the_addresses_of_the_service_are_found_given_ones_are_kept(run: Run, tmp_path: Path) -> None:
    service(run, "192.0.2.11", "192.0.2.12")
    done = deploy(run, tmp_path / "1")
    assert done.returncode == 0, done.stderr
    assert admitted(run) == {"apiServers": "192.0.2.11,192.0.2.12", "givenBy": "detection"}

    service(run, "192.0.2.13")
    assert deploy(run, tmp_path / "2").returncode == 0
    assert admitted(run)["apiServers"] == "192.0.2.13"

    assert deploy(run, tmp_path / "3", API_SERVERS="192.0.2.0/28,2001:db8::1").returncode == 0
    assert admitted(run)["apiServers"] == "192.0.2.0/28,2001:db8::1"

    done = deploy(run, tmp_path / "4", NARROW_NETWORK="yes")
    assert done.returncode == 0, done.stderr
    assert admitted(run) == {"apiServers": "192.0.2.0/28,2001:db8::1", "givenBy": "hand"}
    for name in _VARIABLES:
        found = json.loads(run("kubectl", "-n", "mgpu-system", "get", "networkpolicy", name, "-o", "json").stdout)
        (rule,) = found["spec"]["ingress"]
        assert [source["ipBlock"]["cidr"] for source in rule["from"]] == ["192.0.2.0/28", "2001:db8::1/128"]


def test_an_overlay_that_says_who_may_call_is_left_alone(run: Run, tmp_path: Path) -> None:
    """The environment overrides settings, so none is set."""
    own = "webhook: {apiServers: [192.0.2.1], certDir: /tls}\nscheduler: {apiServers: [192.0.2.1], certDir: /tls}\n"
    done = deploy(run, tmp_path, own)
    assert done.returncode == 0, done.stderr
    assert "the admission endpoints admit" not in done.stdout
