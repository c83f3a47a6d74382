"""Processes of two versions of mgpu work together (docs/versioning.md, "Version skew").

The other version is the commit in the environment variable MGPU_OTHER_VERSION. If the variable is not set, it is the
release before this commit, which is the last tag `v…` among its ancestors. Its processes run from a work tree of that
commit, with the libraries of this one. Before the first release the test is skipped. `make release` sets MGPU_RELEASE,
with which it fails in a shallow clone, because that may lack the tags.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mgpu.model.resource_claims import MEMORY
from playground.cluster import Cluster
from playground.nodes import make_nodes
from release.previous import previous_release
from tests.e2e.bench import PODS, Bench, asking, share
from tests.e2e.clusters import patient
from tests.waiting import until

ROOT = Path(__file__).parents[2]
PARTS = ("webhook", "scheduler", "deviceplugin-node-1")
"""In the order in which docs/operations.md upgrades them."""
MARK = "mgpu of the other version is in"
_TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"


@pytest.fixture(scope="module")
def other_version(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The work tree of the other version."""
    is_release = bool(os.environ.get("MGPU_RELEASE"))
    found = os.environ.get("MGPU_OTHER_VERSION") or previous_release(ROOT, is_shallow_refused=is_release)
    if not found:
        pytest.skip("MGPU_OTHER_VERSION names no commit, and no release precedes this commit")
    folder = tmp_path_factory.mktemp("other") / "mgpu"
    assert _git("worktree", "add", "--detach", str(folder), found) is not None, f"{found} is no commit"
    # Python imports this module at the start of each process, whose log then says that it is of the other version.
    (folder / "sitecustomize.py").write_text(f"import mgpu\nprint('{MARK}', mgpu.__path__, flush=True)\n")
    yield folder
    _git("worktree", "remove", "--force", str(folder))


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


@pytest.fixture(scope="module")
def cluster(other_version: Path) -> Iterator[Cluster]:  # noqa: ARG001  (without another version, none is started)
    with patient(make_nodes(1, 4), components=("dra",)) as made:
        yield made


def run_version(cluster: Cluster, part: str, source: Path) -> None:
    """Start a part again from the packages in `source`, and check that it runs from there."""
    process = cluster.processes[part]
    process.stop()
    process.log.unlink()
    # A path in PYTHONPATH precedes the packages of the editable installation, but not the working directory.
    process.environ |= {"PYTHONPATH": str(source), "PYTHONSAFEPATH": "1"}
    process.start()
    cluster.wait_ready(part)
    marks = [line for line in process.log.read_text().splitlines() if line.startswith(MARK)]
    assert [str(source) in mark for mark in marks] == ([] if source == ROOT else [True])


def claiming(name: str) -> dict[str, Any]:
    pod = share(name)
    pod["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
    pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "share"}]
    return pod


def create_template(bench: Bench) -> None:
    exactly = {"deviceClassName": "mgpu", "capacity": {"requests": {"cores": "10", MEMORY: "4Gi"}}}
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "share"},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
    }
    bench.cluster.api.create(_TEMPLATES, template)


def test_parts_of_two_versions_serve_all_pods_in_each_step_of_an_upgrade_and_of_a_rollback(
    bench: Bench, other_version: Path
) -> None:
    create_template(bench)
    before: dict[str, dict[str, str]] = {}

    def serve(step: str) -> None:
        """Serve pods of this step, and check that the pods of all former steps keep their cards and variables."""
        new = {"mgpu": share(f"m-{step}", 5, 1024), "gpushare": asking(f"g-{step}", gpu_mem=1)}
        new |= {"koordinator": asking(f"k-{step}", core=5, ratio=5), "claim": claiming(f"c-{step}")}
        for pod in new.values():
            bench.create(pod)
        for kind, pod in new.items():
            name = pod["metadata"]["name"]
            if kind != "claim":
                bench.exact(name)
            bench.runs(name)
            before[name] = bench.environment(name, "c")
        for name, environment in before.items():
            bench.cluster.kubelets["node-1"].restart_container("default", name, "c")
            until(lambda name=name: bench.raw(name)["status"].get("phase") == "Running")  # type: ignore[misc]
            assert bench.environment(name, "c") == environment
        assert bench.within_capacity()
        bench.delete(f"g-{step}")
        del before[f"g-{step}"]

    steps = [*((part, other_version) for part in reversed(PARTS)), *((part, ROOT) for part in PARTS)]
    serve("start")
    for number, (part, source) in enumerate(steps):
        run_version(bench.cluster, part, source)
        serve(f"{number}")
    for name in list(before):
        bench.delete(name)
    until(lambda: not bench.cluster.api.list(PODS)[0])
