"""The API server that a kubeconfig file names, with the user's credentials. The kubernetes package reads the file.

The other modules import this one only when a kubeconfig is used, because the package is slow to import and pods have no
kubeconfig (`mgpu.kube.service_account`). It also uses the package's transport, which knows the proxies that the user
and the file name.
"""

import ssl
import threading
from collections.abc import Mapping
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.config import kube_config

from mgpu.kube.server import NoCredentials
from mgpu.model.errors import BadObject, Problem

_loading = threading.Lock()
"""Guards the global state of the kubernetes package while a configuration is loaded.

`read_kubeconfig` uses two private names of that package, `_temp_files` and `_cleanup_temp_files`, so check them when
you upgrade it.
"""


class Configured:
    """A `Server`.

    Args:
        configuration: the server and the credentials, as the kubernetes package has read them.
        context: replaces the certificates of `configuration`.
    """

    def __init__(self, configuration: client.Configuration, context: ssl.SSLContext | None = None) -> None:
        self._configuration = configuration
        self._context = context

    @property
    def url(self) -> str:
        return str(self._configuration.host.rstrip("/"))

    def make_pool(self, **options: Any) -> urllib3.PoolManager:
        pool: urllib3.PoolManager = client.ApiClient(self._configuration).rest_client.pool_manager
        arguments = pool.connection_pool_kw
        if self._context is not None:
            for name in ("ca_certs", "cert_file", "key_file"):
                arguments.pop(name, None)
            arguments["ssl_context"] = self._context
        arguments.update(options)
        return pool

    def credentials(self) -> Mapping[str, str]:
        try:
            found: Any = self._configuration.auth_settings()  # renews a token that has expired
        except config.ConfigException as error:
            raise NoCredentials(str(error)) from error
        return {one["key"]: one["value"] for one in found.values() if one["in"] == "header"}


def read_kubeconfig(files: str, context: str) -> Configured:
    """Return the server of a context.

    Args:
        files: the path of a file, or of several that are merged, as in the variable KUBECONFIG.
        context: the name of the context; "" means the current one.

    Raises:
        BadObject: there is no such context, or a file cannot be read.
    """
    configuration = client.Configuration()
    with _loading:
        try:
            config.load_kube_config(files, context=context or None, client_configuration=configuration)  # type: ignore[no-untyped-call]
            return Configured(configuration, _load_certificates(configuration) if kube_config._temp_files else None)
        except (config.ConfigException, OSError, ValueError) as error:
            raise BadObject([Problem(files or "kubeconfig", " ".join(str(error).split()))]) from error
        finally:
            kube_config._cleanup_temp_files()  # type: ignore[no-untyped-call]


def _load_certificates(configuration: client.Configuration) -> ssl.SSLContext:
    """Load the certificates now, so that the temporary files can be removed.

    The kubernetes package writes the inline certificates and keys of a kubeconfig to temporary files and reads them
    for each connection. If the process were killed, the files with the keys would remain.
    """
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    context.check_hostname = bool(configuration.verify_ssl)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


def find_namespace(files: str, context: str) -> str | None:
    """Return the namespace of a context: "" if it names none, and None if the files cannot be read.

    If `context` is "" or unknown, the current context is used.
    """
    try:
        contexts, active = config.list_kube_config_contexts(files)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        return None
    chosen = next((row for row in contexts if row["name"] == context), active)
    return str((chosen.get("context") or {}).get("namespace") or "")


def context_names(files: str) -> list[str]:
    """Return the names of all contexts: none if the files cannot be read."""
    try:
        contexts, _ = config.list_kube_config_contexts(files)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError):
        return []
    return [str(row["name"]) for row in contexts]
