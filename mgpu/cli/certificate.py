"""The serving certificate of a process: given, or made, shared and published by itself."""

import logging
import os
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

import click

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.secrets import SecretStore
from mgpu.model.errors import BadObject, Problem, RetryLater
from mgpu.serving.folder import Folder, given, temporary
from mgpu.serving.keeper import Keeper
from mgpu.serving.trust import publish
from mgpu.settings import SchedulerSettings, WebhookSettings

log = logging.getLogger(__name__)


def in_cluster(kubeconfig: str) -> bool:
    return not kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ


def prepare(
    own: WebhookSettings | SchedulerSettings, kubeconfig: str | None, kinds: Collection[str], stack: ExitStack
) -> tuple[tuple[Path, Path], Keeper | None]:
    """(chain, key), and who keeps them fresh; None: somebody else does (`certDir`).

    kubeconfig: as `Api.connect` takes it; None: there is no cluster to publish the CA in.
    kinds: the webhook configurations named `own.configuration` that are told of the CA.
    stack: what is to be undone when the process ends. Raises BadObject, ClickException.
    """
    if own.cert_dir:
        return given(Path(own.cert_dir)), None
    folder = Folder(Path(own.self_signed_dir or temporary(stack, "mgpu-")))
    api = None if kubeconfig is None else Api.connect(kubeconfig)
    store = SecretStore(api, own.namespace, f"{own.service}-tls") if api and in_cluster(kubeconfig or "") else None

    tell = _publisher(api, kinds, own.configuration) if api else None
    keeper = Keeper(folder, _names(own), store, tell)
    try:
        keeper.renew()
    except OSError as error:
        raise BadObject([Problem(str(folder.path), f"cannot keep certificates: {error.strerror}")]) from error
    except (ApiError, Unreachable, RetryLater) as error:
        raise click.ClickException(f"no serving certificate: {error}") from error
    if api:
        api.close()  # the workers open connections of their own
    return (folder.chain, folder.key), keeper


def _names(own: WebhookSettings | SchedulerSettings) -> set[str]:
    """What clients may call this process by."""
    service = f"{own.service}.{own.namespace}.svc"
    listening = {own.host} - {"", "0.0.0.0", "::"}
    return {service, f"{service}.cluster.local", "localhost", "127.0.0.1", "::1", *listening, *own.names}


def _publisher(api: Api, kinds: Collection[str], configuration: str) -> Callable[[bytes], None]:
    def tell(ca: bytes) -> None:
        for kind in kinds:
            if publish(api, kind, configuration, ca):
                log.info("CA bundle published", extra={"kind": kind, "configuration": configuration})

    return tell
