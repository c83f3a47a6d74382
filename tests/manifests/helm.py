"""Renders the Helm chart. Helm is in `.tools` (`make helm`), or on the PATH."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.manifests.rendered import MANIFESTS, ROOT, Json, tool

CHART = MANIFESTS / "chart" / "mgpu"
KUBERNETES = "1.36.2"
WITHOUT_CLUSTER: Json = {
    "certificates": {"mode": "script"},
    "recordKeys": {"create": False},
    "apiServers": {"addresses": [], "detect": False},
}
"""Values for `helm template`, which cannot read a cluster: the scripts do what the chart would do."""


def helm(*arguments: object, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Run Helm. Skips the test if it is not installed."""
    program = tool("helm")
    if not program:
        pytest.skip("Helm is neither in `.tools` (`make helm` builds it) nor on the PATH")
    return subprocess.run(
        [program, *map(str, arguments)],
        # Without the files of the user who runs the tests.
        env={**os.environ, "HELM_CONFIG_HOME": str(ROOT / ".tools" / "none"), "KUBECONFIG": os.devnull, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def template(
    folder: Path, values: Json, *options: str, namespace: str = "mgpu-system", chart: Path = CHART
) -> "subprocess.CompletedProcess[str]":
    """Run `helm template` with values. `folder` is for a file with them."""
    file = folder / "values.json"
    file.write_text(json.dumps(values))
    return helm(
        "template", "mgpu", chart, "-n", namespace, "-f", file, "--kube-version", KUBERNETES, "--no-hooks", *options
    )


def objects(folder: Path, values: Json, namespace: str = "mgpu-system") -> tuple[Json, ...]:
    done = template(folder, merged(WITHOUT_CLUSTER, values), namespace=namespace)
    assert done.returncode == 0, done.stderr
    return tuple(d for d in yaml.load_all(done.stdout, yaml.CSafeLoader) if d)


def merged(below: Json, above: Json) -> Json:
    """Return values as Helm merges two files of them."""
    result = dict(below)
    for name, value in above.items():
        old = result.get(name)
        result[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
