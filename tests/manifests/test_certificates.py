"""manifests/certificates.sh creates the authorities, keeps them, and rotates them without an interruption of trust.

deploy.sh runs once for all tests. Each begins with the authorities of that first deployment, or without any.
"""

import base64
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store

from mgpu.kube import Api
from mgpu.kube.secrets import SecretStore
from mgpu.model.resource_claims import CLASSES
from mgpu.serving.certificates import (
    CA,
    CA_KEY,
    CA_LIFETIME,
    CHAIN,
    Authority,
    Files,
    create_authority,
    ensure_certificate,
)
from tests.manifests.conftest import Run, runner
from tests.manifests.rendered import MANIFESTS, WITHOUT_POLICIES, WITHOUT_RECORD_KEY, kustomization

pytestmark = pytest.mark.kubernetes(1, 34)  # The overlay has components/dra.

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
SECRETS = "/api/v1/namespaces/mgpu-system/secrets"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
CONFIGURATIONS = {
    "webhook": (
        "mutatingwebhookconfigurations/mgpu-webhook",
        "mutatingwebhookconfigurations/0-mgpu-webhook",
        "validatingwebhookconfigurations/mgpu-webhook",
    ),
    "scheduler": (
        "mutatingwebhookconfigurations/mgpu-scheduler",
        "mutatingwebhookconfigurations/mgpu-claims",
    ),
}


def deploy(run: Run, folder: Path) -> "subprocess.CompletedProcess[str]":
    claims = [MANIFESTS / "components/dra"]
    own = kustomization(folder, MANIFESTS / "base", claims, patches=[WITHOUT_POLICIES, WITHOUT_RECORD_KEY])
    done = run(MANIFESTS / "deploy.sh", own, env={"WAIT": "0", "API_SERVERS": "192.0.2.1"})
    assert done.returncode == 0, done.stderr
    return done


@dataclass(frozen=True)
class Installation:
    """The first deployment on an empty cluster: its folder, and the content of each process's Secret afterwards."""

    folder: Path
    secrets: dict[str, Files]


@pytest.fixture(scope="module")
def deployed(kubeconfig: Path, api: Api, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("deployed")
    deploy(runner(kubeconfig, folder), folder)
    found = {process: secret(api, process) for process in CONFIGURATIONS}
    for process, files in found.items():
        assert bundles(api, process) == {files[CA]}
    return Installation(folder, found)


@pytest.fixture
def clean(deployed: Installation, api: Api) -> Installation:
    """The installation, without the authorities of the test before."""
    for row in api.list(SECRETS)[0]:
        api.delete(f"{SECRETS}/{row['metadata']['name']}")
    return deployed


@pytest.fixture
def installed(clean: Installation, api: Api) -> Installation:
    """The installation with the authorities that its deployment made."""
    for process, files in clean.secrets.items():
        api.create(SECRETS, tls_secret(process, files))
        if bundles(api, process) != {files[CA]}:
            trust(api, process, files[CA])
    return clean


def certificates(run: Run, mode: str = "keep", days: int = 3650) -> "subprocess.CompletedProcess[str]":
    """Run certificates.sh as deploy.sh or an administrator does."""
    done = run(MANIFESTS / "certificates.sh", env={"CA": mode, "DAYS": str(days)})
    assert done.returncode == 0, done.stderr
    return done


def secret(api: Api, process: str) -> Files:
    return SecretStore(api, "mgpu-system", f"mgpu-{process}-tls").read()[0]


def bundles(api: Api, process: str) -> set[bytes]:
    return {
        base64.b64decode(hook["clientConfig"].get("caBundle") or "")
        for path in CONFIGURATIONS[process]
        for hook in api.get(f"{ADMISSION}/{path}")["webhooks"]
    }


def trust(api: Api, process: str, bundle: bytes) -> None:
    for path in CONFIGURATIONS[process]:
        hooks = api.get(f"{ADMISSION}/{path}")["webhooks"]
        for hook in hooks:
            hook["clientConfig"]["caBundle"] = base64.b64encode(bundle).decode()
        api.patch(f"{ADMISSION}/{path}", {"webhooks": hooks})


def renew(api: Api, process: str) -> Files:
    """Renew the certificate as a process does every minute."""
    store = SecretStore(api, "mgpu-system", f"mgpu-{process}-tls")
    return ensure_certificate(store, {f"mgpu-{process}.mgpu-system.svc"}, datetime.now(UTC), Authority.GIVEN)


def trusts(api: Api, process: str, files: Files) -> bool:
    """Return whether the CA bundles of the webhook configurations accept the certificate of the process."""
    (bundle,) = bundles(api, process)
    store = Store(x509.load_pem_x509_certificates(bundle))
    verifier = PolicyBuilder().store(store).build_server_verifier(x509.DNSName(f"mgpu-{process}.mgpu-system.svc"))
    try:
        verifier.verify(x509.load_pem_x509_certificate(files[CHAIN]), [])
    except x509.verification.VerificationError:
        return False
    return True


def test_first_deployment_gives_each_process_an_authority_of_its_own_that_the_api_server_trusts(
    installed: Installation, api: Api
) -> None:
    assert installed.secrets["webhook"][CA_KEY] != installed.secrets["scheduler"][CA_KEY]
    for process in CONFIGURATIONS:
        assert trusts(api, process, renew(api, process))


def test_second_deployment_keeps_the_authority_and_removes_only_parts_of_an_earlier_version(
    run: Run, api: Api, installed: Installation
) -> None:
    """An API server keeps objects that an overlay no longer has."""
    before = renew(api, "webhook")
    former = parts_of_an_earlier_version(api)
    assert "new CA" not in deploy(run, installed.folder).stdout
    assert secret(api, "webhook") == before
    assert bundles(api, "webhook") == {before[CA]}
    left = {
        f"{collection}/{row['metadata']['name']}"
        for collection in {path.rpartition("/")[0] for path in former}
        for row in api.get(collection)["items"]
    }
    assert left.isdisjoint(former)
    assert f"{RBAC}/clusterroles/others" in left
    assert f"{RBAC}/clusterroles/mgpu-scheduler" in left
    assert f"{ADMISSION}/mutatingwebhookconfigurations/mgpu-claims" in left


def parts_of_an_earlier_version(api: Api) -> set[str]:
    """Create them and an unrelated role. Return the paths of those that a deployment must delete."""
    ours = {"labels": {"app.kubernetes.io/part-of": "mgpu"}}
    rule = {
        "apiGroups": ["admissionregistration.k8s.io"],
        "resources": ["mutatingwebhookconfigurations"],
        "verbs": ["patch"],
    }
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "mgpu-webhook"}
    secrets = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}
    former: dict[str, dict[str, Any]] = {
        f"{RBAC}/clusterroles/mgpu-webhook": {"rules": [rule]},
        f"{RBAC}/clusterrolebindings/mgpu-webhook": {"roleRef": ref},
        f"{RBAC}/namespaces/mgpu-system/roles/mgpu-webhook": {"rules": [secrets]},
        f"{RBAC}/namespaces/mgpu-system/rolebindings/mgpu-webhook": {"roleRef": {**ref, "kind": "Role"}},
        f"{ADMISSION}/mutatingwebhookconfigurations/mgpu-former": {"webhooks": []},
        f"{CLASSES}/mgpu-former": {"spec": {}},
    }
    for path, body in former.items():
        collection, _, name = path.rpartition("/")
        api.create(collection, {"metadata": {"name": name, **ours}, **body})
    api.create(f"{RBAC}/clusterroles", {"metadata": {"name": "others", **ours}, "rules": [rule]})
    return former.keys() | set()


def test_an_overlay_applied_alone_leaves_the_bundles(run: Run, api: Api, installed: Installation) -> None:
    before = bundles(api, "webhook")
    flags = ("--server-side", "--force-conflicts", "--field-manager=mgpu")
    done = run("kubectl", "apply", *flags, "-k", installed.folder)
    assert done.returncode == 0, done.stderr
    assert bundles(api, "webhook") == before


@pytest.mark.usefixtures("installed")
def test_a_rotation_is_trusted_at_every_step(run: Run, api: Api) -> None:
    old = renew(api, "webhook")
    certificates(run, "rotate")
    assert len(x509.load_pem_x509_certificates(secret(api, "webhook")[CA])) == 2
    assert trusts(api, "webhook", old)

    refused = run(MANIFESTS / "certificates.sh", env={"CA": "settle"})
    assert refused.returncode == 1
    assert "does not serve under the newest CA yet" in refused.stderr
    assert trusts(api, "webhook", old)

    for process in CONFIGURATIONS:
        assert trusts(api, process, renew(api, process))
    certificates(run, "settle")
    new = secret(api, "webhook")
    assert len(x509.load_pem_x509_certificates(new[CA])) == 1
    assert trusts(api, "webhook", new)
    assert not trusts(api, "webhook", old)
    assert renew(api, "webhook") == new


@pytest.mark.usefixtures("clean")
def test_an_authority_that_ends_soon_is_followed_by_the_next_one_and_one_without_its_key_is_replaced(
    run: Run, api: Api
) -> None:
    ending = create_authority(datetime.now(UTC) - CA_LIFETIME + timedelta(days=90))
    keyless = {**create_authority(datetime.now(UTC)), CA_KEY: b"lost"}
    api.create(SECRETS, tls_secret("webhook", ending))
    api.create(SECRETS, tls_secret("scheduler", keyless))
    said = certificates(run).stdout
    assert "process webhook: new CA beside the present one" in said
    assert "process scheduler: new CA\n" in said
    assert ending[CA] in secret(api, "webhook")[CA]
    assert keyless[CA] not in secret(api, "scheduler")[CA]
    for process in CONFIGURATIONS:
        assert trusts(api, process, renew(api, process))


@pytest.mark.usefixtures("installed")
def test_an_authority_of_a_short_life_stays_alone(run: Run, api: Api) -> None:
    """With DAYS below 180 each deployment added two authorities, and trust in none of them ended."""
    api.delete(f"{SECRETS}/mgpu-webhook-tls")
    certificates(run, days=100)
    first = secret(api, "webhook")
    certificates(run, days=100)
    assert secret(api, "webhook") == first
    assert len(x509.load_pem_x509_certificates(first[CA])) == 1


def tls_secret(process: str, content: Files) -> dict[str, Any]:
    data = {"tls.crt": b"", "tls.key": b"", **content}
    encoded = {name: base64.b64encode(value).decode() for name, value in data.items()}
    return {"metadata": {"name": f"mgpu-{process}-tls"}, "type": "kubernetes.io/tls", "data": encoded}
