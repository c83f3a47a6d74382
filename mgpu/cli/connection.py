"""How commands connect to a cluster and report its errors, the user's namespace, and the settings of the installation.

The commands that read a cluster share this module. A problem with the cluster must be reported in one line, without a
traceback. `mgpu.cli.kubectl_options` has the options from which a `Connection` comes.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import click

from mgpu.cli.process_settings import read_settings
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.client import find_kubeconfig
from mgpu.presentation.plain_text import one_line
from mgpu.settings import Settings, load_settings

A = TypeVar("A", bound=Api)

NAMESPACE = "mgpu-system"
"""The default namespace of the installation."""
_CONFIGMAP, _FILE = "mgpu-config", "mgpu.yaml"
_POD_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


@dataclass(frozen=True, slots=True)
class Connection:
    """How a command connects to the API server.

    Attributes:
        kubeconfig: the file; "" for the one that kubectl uses.
        context: "" for the current context of the file.
        user: the user whose rights the requests have; "" for the user of the kubeconfig.
        groups: the groups of that user.
        timeout: the most seconds for a request; 0 for no limit, None if the user names none.
    """

    kubeconfig: str = ""
    context: str = ""
    user: str = ""
    groups: tuple[str, ...] = ()
    timeout: float | None = None

    def seconds(self, default: float) -> float | None:
        """Return the most seconds for a request, or None for no limit. `default` applies if the user names none."""
        return default if self.timeout is None else self.timeout or None

    def connect(self, seconds: float, kind: type[A]) -> A:
        """Return a connection with at most `seconds` for a request, unless the user says otherwise.

        No request is sent. Raises BadObject if there is no usable configuration.
        """
        identity = [("Impersonate-User", self.user)] if self.user else []
        identity += [("Impersonate-Group", group) for group in self.groups]
        api = kind.connect(self.kubeconfig, context=self.context, timeout=self.seconds(seconds), impersonation=identity)
        assert isinstance(api, kind)
        return api


class ServerError(click.ClickException):
    """The API server returned an error or did not answer. click prints it as kubectl does, and exits with code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.format_message(), file=file, err=file is None)


@contextmanager
def report_api_errors() -> Iterator[None]:
    """Report an error of the API server, or a missing answer, in one line on stderr, with exit code 1."""
    try:
        yield
    except ApiError as error:
        reason = f" ({error.reason})" if error.reason else ""
        raise ServerError(one_line(f"Error from server{reason}: {error.message or error}")) from error
    except Unreachable as error:
        raise ServerError(one_line(f"Unable to connect to the server: {error}")) from error


def current_namespace(kubeconfig: str, context: str) -> str:
    """Return the namespace of a kubeconfig context or, without a kubeconfig, the namespace of this pod.

    If the context or the pod names none, the result is `default`. If `context` is "" or unknown, the current context is
    used; callers also call `Api.connect`, which raises an error for unknown contexts.
    """
    files = find_kubeconfig(kubeconfig)
    if not files:
        return _pod_namespace()
    from mgpu.kube.kubeconfig import find_namespace  # Only now, because pods do without the kubernetes package.

    found = find_namespace(files, context)
    return _pod_namespace() if found is None else found or "default"


def _pod_namespace() -> str:
    """Return the namespace that kubectl uses in a pod without a kubeconfig; `default` outside of pods."""
    try:
        found = os.environ.get("POD_NAMESPACE") or Path(_POD_NAMESPACE).read_text().strip()
    except OSError:
        found = ""
    return found or "default"


def read_installed_settings(api: Api, config: Path | None, namespace: str = NAMESPACE) -> tuple[Settings, str]:
    """Return the settings, and the name of their source for messages.

    The source is the file `config`, or else the ConfigMap that the scheduler's Deployment mounts. If the Deployment or
    the ConfigMap does not exist or the user may not read it, the source is the defaults. The environment variables of
    this command override the source. Flags and environment variables of the installation's processes are not
    considered.

    Raises:
        BadObject: if the settings are invalid.
        ApiError: if the API server answers with an error other than 403 and 404.
        Unreachable: if the API server does not answer.
    """
    if config:
        return read_settings(config, os.environ, {}), str(config)
    try:
        name = _config_map_name(api.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/mgpu-scheduler"))
        data = api.get(f"/api/v1/namespaces/{namespace}/configmaps/{name}").get("data") or {}
    except ApiError as error:
        if error.status not in (403, 404):
            raise
        data = {}
    source = f"ConfigMap {namespace}/{name}" if _FILE in data else "the defaults"
    return load_settings(str(data.get(_FILE, "")), source, os.environ), source


def _config_map_name(deployment: Mapping[str, Any]) -> str:
    """Return the name of the ConfigMap with the settings. kustomize appends a hash to its name in the Deployment."""
    volumes = deployment["spec"]["template"]["spec"].get("volumes") or ()
    names = (str((volume.get("configMap") or {}).get("name") or "") for volume in volumes)
    return next((name for name in names if name.startswith(_CONFIGMAP)), _CONFIGMAP)
