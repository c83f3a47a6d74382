"""manifests/record-keys.sh makes the keys of records once, keeps them, and rotates them so that all seals count on."""

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mgpu.dialects.records import Records
from mgpu.kube import Api
from mgpu.model.pods import Pod
from mgpu.model.seals import Subject
from mgpu.serving.record_keys import read_records
from mgpu.settings import load_settings
from tests.manifests.conftest import Run
from tests.manifests.rendered import MANIFESTS, named, rendered

NAMESPACE = "/api/v1/namespaces/mgpu-system"
RECORD = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "0"}


@pytest.fixture
def api(kubeconfig: Path) -> Iterator[Api]:
    made = Api.connect(str(kubeconfig))
    if not any(row["metadata"]["name"] == "mgpu-system" for row in made.list("/api/v1/namespaces")[0]):
        made.create("/api/v1/namespaces", {"metadata": {"name": "mgpu-system"}})
    yield made
    made.close()


def mounted(api: Api, folder: Path, *, signing: bool) -> Records:
    """As a process reads what the kubelet mounts, by the paths that the ConfigMap itself names."""
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
    return read_records(load_settings(flags=flags), signing=signing)


def test_the_keys_are_made_once_and_rotated_without_a_seal_that_stops_counting(
    run: Run, api: Api, tmp_path: Path
) -> None:
    script, subject = MANIFESTS / "record-keys.sh", Subject("u", "ns", "p", "n1")
    first = run(script)
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

    assert run(script).returncode == 0
    again = mounted(api, tmp_path / "again", signing=True)
    assert again.keys is not None
    assert (again.keys.public.keys(), again.keys.since) == (scheduler.keys.public.keys(), scheduler.keys.since)

    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text('#!/bin/sh\ncase "$*" in *rollout*) exit 0 ;; esac\nPATH=${PATH#*:} exec kubectl "$@"\n')
    kubectl.chmod(0o755)  # nobody rolls anything out here
    rotated = run(script, env={"KEY": "rotate", "PATH": f"{kubectl.parent}:{os.environ['PATH']}"})
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


def test_the_scheduler_alone_mounts_the_private_key() -> None:
    """And both find the public keys where the ConfigMap says that they are."""
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
