"""manifests/record-keys.sh creates the keys of allocation records and keeps them; after a rotation old seals count."""

import base64
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mgpu.dialects.record_verification import RecordVerifier
from mgpu.kube import Api, ApiError
from mgpu.model.pods import Pod
from mgpu.model.record_seals import Subject
from mgpu.serving.record_keys import make_record_verifier
from mgpu.settings import load_settings
from tests.manifests.conftest import Run
from tests.manifests.rendered import MANIFESTS, named, rendered

NAMESPACE = "/api/v1/namespaces/mgpu-system"
DAEMONSETS = "/apis/apps/v1/namespaces/mgpu-system/daemonsets"
SCHEDULER, AGENTS = f"{NAMESPACE}/pods/mgpu-scheduler-1", f"{DAEMONSETS}/mgpu-deviceplugin"
SCRIPT = MANIFESTS / "record-keys.sh"
RECORD = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}


@pytest.fixture
def api(api: Api) -> Iterator[Api]:
    """Create the namespace; delete the keys after each test."""
    if not any(row["metadata"]["name"] == "mgpu-system" for row in api.list("/api/v1/namespaces")[0]):
        api.create("/api/v1/namespaces", {"metadata": {"name": "mgpu-system"}})
    yield api
    for path in (f"{NAMESPACE}/secrets/mgpu-record-key", f"{NAMESPACE}/configmaps/mgpu-record-keys", SCHEDULER, AGENTS):
        try:
            api.delete(path)
        except ApiError as error:
            if error.status != 404:
                raise


@pytest.fixture(scope="module")
def first_keys() -> dict[str, Any]:
    """Path → the data of an object of the first keys, once `with_keys` has made them."""
    return {}


@pytest.fixture
def with_keys(run: Run, api: Api, first_keys: dict[str, Any]) -> None:
    """Have the script make the keys once; create them again as it made them for the tests after that."""
    paths = ("secrets/mgpu-record-key", "configmaps/mgpu-record-keys")
    for path in paths if first_keys else ():
        collection, name = path.split("/")
        api.create(f"{NAMESPACE}/{collection}", {"metadata": {"name": name}, "data": first_keys[path]})
    if not first_keys:
        assert run(SCRIPT).returncode == 0
        first_keys.update({path: api.get(f"{NAMESPACE}/{path}")["data"] for path in paths})


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    """Return the file of the `kubectl rollout` commands that a script ran. A stand-in for kubectl only records them."""
    kubectl, log = tmp_path / "bin" / "kubectl", tmp_path / "rollouts"
    kubectl.parent.mkdir()
    kubectl.write_text(
        f'#!/bin/sh\ncase "$*" in *rollout*) echo "$*" >>{log} && exit 0 ;; esac\nPATH=${{PATH#*:}} exec kubectl "$@"\n'
    )
    kubectl.chmod(0o755)
    log.touch()
    return log


def path_with(rollouts: Path) -> str:
    return f"{rollouts.parent / 'bin'}:{os.environ['PATH']}"


def scheduler(*secrets: str) -> dict[str, Any]:
    """A pod of the scheduler that mounts these Secrets."""
    labels = {"app.kubernetes.io/name": "mgpu", "app.kubernetes.io/component": "scheduler"}
    volumes = [{"name": f"v{i}", "secret": {"secretName": secret}} for i, secret in enumerate(secrets)]
    spec = {"containers": [{"name": "c", "image": "mgpu"}], "volumes": volumes, "automountServiceAccountToken": False}
    return {"metadata": {"name": "mgpu-scheduler-1", "labels": labels}, "spec": spec}


def agents_replaced_by_hand() -> dict[str, Any]:
    labels = {"app": "deviceplugin"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "mgpu"}]}}
    spec = {"selector": {"matchLabels": labels}, "template": template, "updateStrategy": {"type": "OnDelete"}}
    return {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "mgpu-deviceplugin"}, "spec": spec}


def since(api: Api) -> str:
    return str(api.get(f"{NAMESPACE}/configmaps/mgpu-record-keys")["data"]["since"])


def mounted(api: Api, folder: Path, *, signing: bool) -> RecordVerifier:
    """Return the verifier of a process that reads the mounted keys, at the paths that the ConfigMap names."""
    data: dict[str, str] = api.get(f"{NAMESPACE}/configmaps/mgpu-record-keys")["data"]
    private: dict[str, str] = api.get(f"{NAMESPACE}/secrets/mgpu-record-key")["data"]
    public = folder / data["publicKeys"].strip("/")
    public.mkdir(parents=True, exist_ok=True)
    for name, text in data.items():
        (public / name).write_text(text)
    key = folder / data["signingKey"].strip("/")
    key.parent.mkdir(exist_ok=True)
    key.write_bytes(base64.b64decode(private[key.name]))
    flags = {"records.publicKeys": str(public), "records.signingKey": str(key)}
    return make_record_verifier(load_settings(flags=flags), signing=signing)


def test_the_keys_are_made_once_and_rotated_without_a_seal_that_stops_counting(
    run: Run, api: Api, tmp_path: Path, rollouts: Path
) -> None:
    subject = Subject("u", "ns", "p", "n1")
    first = run(SCRIPT)
    assert first.returncode == 0, first.stderr
    scheduler, agent = (mounted(api, tmp_path / str(signing), signing=signing) for signing in (True, False))
    assert scheduler.keys is not None
    assert agent.keys is not None
    assert agent.keys.signer is None
    assert scheduler.keys.since == api.get(f"{NAMESPACE}/secrets/mgpu-record-key")["metadata"]["creationTimestamp"]
    sealed = Pod("ns", "p", "u", scheduler.sealed(subject, RECORD), node="n1", created=scheduler.keys.since)
    (_, judged) = agent.judge(sealed)
    assert judged is not None
    assert judged.finding is None

    assert run(SCRIPT).returncode == 0
    again = mounted(api, tmp_path / "again", signing=True)
    assert again.keys is not None
    assert (again.keys.public.keys(), again.keys.since) == (scheduler.keys.public.keys(), scheduler.keys.since)

    rotated = run(SCRIPT, env={"KEY": "rotate", "PATH": path_with(rollouts)})
    assert rotated.returncode == 0, rotated.stderr
    new = mounted(api, tmp_path / "new", signing=True)
    assert new.keys is not None
    assert new.keys.signer is not None
    assert new.keys.signer.id not in scheduler.keys.public
    assert len(new.keys.public) == 2
    assert new.keys.since == scheduler.keys.since
    (_, judged) = new.judge(sealed)
    assert judged is not None
    assert judged.finding is None


def test_upgrade_from_a_scheduler_without_seals_its_records_count_until_it_is_replaced(
    run: Run, api: Api, rollouts: Path
) -> None:
    """Its decisions have no seal until then, and containers of these pods must still be able to start."""
    api.create(f"{NAMESPACE}/pods", scheduler("mgpu-scheduler-tls"))
    before = datetime.now(UTC) - timedelta(seconds=1)
    done = run(SCRIPT, env={"PATH": path_with(rollouts)})
    assert done.returncode == 0, done.stderr
    first = since(api)
    assert before < datetime.fromisoformat(first) - timedelta(minutes=15) < datetime.now(UTC)
    assert f"what is created from {first} on has to be sealed" in done.stdout
    assert rollouts.read_text() == "", "the upgrade itself replaces the processes"

    api.delete(SCHEDULER, {"gracePeriodSeconds": 0})
    api.create(f"{NAMESPACE}/pods", scheduler("mgpu-scheduler-tls", "mgpu-record-key"))
    assert run(SCRIPT, env={"PATH": path_with(rollouts)}).returncode == 0
    assert since(api) == first
    assert rollouts.read_text() == ""


def test_keys_made_for_processes_that_started_without_they_are_restarted(run: Run, api: Api, rollouts: Path) -> None:
    """Otherwise an agent that restarts would reject every decision of a scheduler without a key."""
    api.create(f"{NAMESPACE}/pods", scheduler("mgpu-record-key"))
    done = run(SCRIPT, env={"PATH": path_with(rollouts)})
    assert done.returncode == 0, done.stderr
    assert datetime.fromisoformat(since(api)) > datetime.now(UTC) + timedelta(minutes=10)
    (restarted,) = rollouts.read_text().splitlines()
    assert restarted == "-n mgpu-system rollout restart deployment/mgpu-scheduler daemonset/mgpu-deviceplugin"


@pytest.mark.usefixtures("with_keys")
def test_rotation_with_agents_that_are_replaced_by_hand_ends_when_all_know_the_new_key(
    run: Run, api: Api, rollouts: Path
) -> None:
    """For `components/slices`: an agent rejects seals of an unknown key, so that containers of its node would wait."""
    old = api.get(f"{NAMESPACE}/secrets/mgpu-record-key")["data"]["signing.pem"]
    api.create(DAEMONSETS, agents_replaced_by_hand())

    def rotate(updated: int) -> int:
        generation = api.get(AGENTS)["metadata"]["generation"]
        numbers = {"desiredNumberScheduled": 2, "currentNumberScheduled": 2, "numberMisscheduled": 0, "numberReady": 2}
        status = {**numbers, "updatedNumberScheduled": updated, "observedGeneration": generation}
        api.patch(f"{AGENTS}/status", {"status": status})
        return run(SCRIPT, env={"KEY": "rotate", "PATH": path_with(rollouts)}).returncode

    assert rotate(1) == 1
    secret = api.get(f"{NAMESPACE}/secrets/mgpu-record-key")["data"]
    assert secret["signing.pem"] == old
    assert rotate(2) == 0
    assert api.get(f"{NAMESPACE}/secrets/mgpu-record-key")["data"] == {"signing.pem": secret["next.pem"]}
    public = api.get(f"{NAMESPACE}/configmaps/mgpu-record-keys")["data"]
    assert sum(name.endswith(".pem") for name in public) == 2
    assert rollouts.read_text().count("restart deployment/mgpu-scheduler daemonset/mgpu-deviceplugin") == 1


@pytest.mark.usefixtures("with_keys")
def test_since_with_a_secret_that_is_made_again_stays_and_the_former_key_counts(
    run: Run, api: Api, tmp_path: Path
) -> None:
    """A later time would make every record count that was forged before it."""
    api.patch(f"{NAMESPACE}/configmaps/mgpu-record-keys", {"data": {"since": "2026-01-01T00:00:00Z"}})
    first = mounted(api, tmp_path / "first", signing=False)
    api.delete(f"{NAMESPACE}/secrets/mgpu-record-key")
    made = run(SCRIPT)
    assert made.returncode == 0, made.stderr
    assert since(api) == "2026-01-01T00:00:00Z"
    again = mounted(api, tmp_path / "again", signing=True)
    assert first.keys is not None
    assert again.keys is not None
    assert first.keys.public.keys() < again.keys.public.keys()


def test_the_scheduler_alone_mounts_the_private_key() -> None:
    """The scheduler and the agent mount the public keys at the path that the ConfigMap names."""
    documents = rendered(MANIFESTS / "base")
    private = []
    for name in ("mgpu-scheduler", "mgpu-deviceplugin", "mgpu-webhook"):
        kind = "DaemonSet" if name == "mgpu-deviceplugin" else "Deployment"
        spec: Any = named(documents, kind, name)["spec"]["template"]["spec"]
        secrets = [volume.get("secret", {}).get("secretName") for volume in spec["volumes"]]
        private += [name] if "mgpu-record-key" in secrets else []
        if name != "mgpu-webhook":
            mounts = {m["name"]: m["mountPath"] for c in spec["containers"] for m in c.get("volumeMounts", ())}
            assert mounts["record-keys"] == "/etc/mgpu-record-keys"
    assert private == ["mgpu-scheduler"]
