"""Which cluster a command for people looks at, chosen as kubectl's users expect."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from kubernetes import config

from mgpu.cli.setup import read_settings
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.presentation.plain_text import one_line
from mgpu.settings import Settings, load_settings

F = TypeVar("F", bound=Callable[..., Any])
NAMESPACE = "mgpu-system"
"""Where the suite is installed, unless it is said otherwise."""
_CONFIGMAP, _FILE = "mgpu-config", "mgpu.yaml"


def connecting(command: F) -> F:
    """The options --kubeconfig and --context of a command."""
    text = "The cluster to look at.  [default: as kubectl chooses it]"
    with_context = click.option("--context", default="", help="Of the kubeconfig.  [default: its current one]")
    return click.option("--kubeconfig", default="", help=text)(with_context(command))


@contextmanager
def answering() -> Iterator[None]:
    """What the cluster refuses, or that it does not answer, in one line; exit code 1."""
    try:
        yield
    except (ApiError, Unreachable) as error:
        message = error.message if isinstance(error, ApiError) else ""
        raise click.ClickException(one_line(message or str(error))) from error


def namespace_of(kubeconfig: str, context: str) -> str:
    """The namespace that kubectl would look into."""
    try:
        contexts, active = config.list_kube_config_contexts(kubeconfig or None)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        return "default"  # in a cluster there is none
    chosen = next((row for row in contexts if row["name"] == context), active)
    return str((chosen.get("context") or {}).get("namespace") or "default")


def settings_of(api: Api, config: Path | None, namespace: str = NAMESPACE) -> tuple[Settings, str]:
    """The settings, and where they are from: this file, else those of the installation in this namespace.

    They are in a ConfigMap that the scheduler's Deployment mounts; where there is none, or nobody may look, they are
    the defaults. What a process was given by flags or its own environment is not seen. Raises BadObject, and what `api`
    raises.
    """
    if config:
        return read_settings(config, os.environ, {}), str(config)
    try:
        name = _mounted(api.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/mgpu-scheduler"))
        data = api.get(f"/api/v1/namespaces/{namespace}/configmaps/{name}").get("data") or {}
    except ApiError as error:
        if error.status not in (403, 404):
            raise
        data = {}
    source = f"ConfigMap {namespace}/{name}" if _FILE in data else "the defaults"
    return load_settings(str(data.get(_FILE, "")), source, os.environ), source


def _mounted(deployment: Mapping[str, Any]) -> str:
    """The ConfigMap's name has a hash where kustomize made it."""
    volumes = deployment["spec"]["template"]["spec"].get("volumes") or ()
    names = (str((volume.get("configMap") or {}).get("name") or "") for volume in volumes)
    return next((name for name in names if name.startswith(_CONFIGMAP)), _CONFIGMAP)
