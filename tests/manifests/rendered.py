"""Renders the kustomizations with kubectl or kustomize, and finds objects in the result."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from playground.apiserver.kinds import BUILT_IN

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
OVERLAYS = sorted(path.parent for path in MANIFESTS.glob("overlays/*/kustomization.yaml"))
FOLDERS = [MANIFESTS / "base", *OVERLAYS]
WITHOUT_POLICIES = {
    "target": {"kind": "ValidatingAdmissionPolicy.*"},
    "patch": "{$patch: delete, apiVersion: any, kind: any, metadata: {name: any}}",
}
"""A patch of a kustomization: the playground's API server has no such kind."""
WITHOUT_RECORD_KEY = {
    "target": {"kind": "Deployment", "name": "mgpu-scheduler"},
    "patch": json.dumps(
        [
            {"op": "replace", "path": f"/spec/template/spec/{path}", "value": []}
            for path in ("volumes", "containers/0/volumeMounts")
        ]
    ),
}
"""A patch with which deploy.sh takes less time: it makes no record key if the scheduler mounts none."""
OWN_CERTIFICATES = "webhook: {certDir: /tls}\nscheduler: {certDir: /tls}\n"
"""Settings under which deploy.sh makes no authorities, which takes less time; test_certificates.py tests those."""
COMPONENTS = sorted(path.parent for path in MANIFESTS.glob("components/*/kustomization.yaml"))


def tool(name: str) -> str | None:
    """Return the path of a program that `make helm` builds, or of the one on the PATH."""
    built = ROOT / ".tools" / name
    return str(built) if built.is_file() else shutil.which(name)


@cache
def text_of(folder: Path) -> str:
    """Return the rendered kustomization as YAML. Skips the test if no program can render it."""
    if kubectl := shutil.which("kubectl"):
        command = [kubectl, "kustomize"]
    elif kustomize := tool("kustomize"):
        command = [kustomize, "build"]
    else:
        pytest.skip("neither kubectl nor kustomize is installed (`make helm` builds kustomize)")
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr  # where kubectl reports deprecated fields
    return done.stdout


@cache
def rendered(folder: Path) -> tuple[Json, ...]:
    return tuple(yaml.load_all(text_of(folder), yaml.CSafeLoader))


def kustomization(folder: Path, below: Path, components: Sequence[Path] = (), **more: Any) -> Path:
    """Write a kustomization into any folder, and return the folder. kustomize accepts only relative paths."""
    top = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(below, folder)],
        "components": [os.path.relpath(path, folder) for path in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(top | more))
    return folder


def with_settings(settings: str) -> Json:
    """Return a patch of a kustomization."""
    replaced = json.dumps([{"op": "replace", "path": "/data/mgpu.yaml", "value": settings}])
    return {"target": {"kind": "ConfigMap", "name": "mgpu-config"}, "patch": replaced}


def served(documents: tuple[Json, ...]) -> list[Json]:
    """Return the documents whose kinds the playground's API server serves."""
    known = {(kind.api_version, kind.kind) for kind in BUILT_IN}
    return [d for d in documents if (d["apiVersion"], d["kind"]) in known]


def as_stream(documents: Sequence[Json]) -> str:
    """Return the documents for `kubectl apply -f -`, in JSON, which is written and read much faster than YAML."""
    return "\n".join(map(json.dumps, documents))


def of_kind(documents: tuple[Json, ...], *kinds: str) -> Iterator[Json]:
    return (document for document in documents if document["kind"] in kinds)


def named(documents: tuple[Json, ...], kind: str, name: str) -> Json:
    (found,) = (d for d in of_kind(documents, kind) if d["metadata"]["name"] == name)
    return found


def workloads(documents: tuple[Json, ...]) -> list[Json]:
    return list(of_kind(documents, "Deployment", "DaemonSet"))


def containers(workload: Json) -> list[Json]:
    spec = workload["spec"]["template"]["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def running_mgpu(workload: Json) -> Json:
    """Return the container that runs the mgpu process."""
    (found,) = (c for c in containers(workload) if "--config=/etc/mgpu/mgpu.yaml" in c.get("args", ()))
    return found
