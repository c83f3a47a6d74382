"""Prepares the serving certificate when `mgpu webhook` or `mgpu scheduler` starts.

The certificate is mounted (`certDir`), or the process creates it and signs it with a certificate authority (CA). The
process must never write a webhook configuration. With that right it could make the API server send every pod of the
cluster to another server.
"""

import os
from contextlib import ExitStack
from pathlib import Path

import click

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.secrets import SecretStore
from mgpu.model.errors import BadObject, Problem, RetryLater
from mgpu.serving.certificate_folder import CertificateFolder, create_private_folder, find_mounted_certificate
from mgpu.serving.certificate_renewer import CertificateRenewer
from mgpu.serving.certificates import NoAuthority
from mgpu.settings import SchedulerSettings, WebhookSettings

REMEDY = "run manifests/certificates.sh (make deploy runs it)"


def runs_in_cluster(kubeconfig: str) -> bool:
    """Return whether this process runs in a pod, and serves the cluster of this pod."""
    return not kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ


def prepare_certificate(
    own: WebhookSettings | SchedulerSettings, kubeconfig: str, stack: ExitStack
) -> tuple[tuple[Path, Path], CertificateRenewer | None]:
    """Return the paths of the certificate chain and the key, and the CertificateRenewer, which is None with `certDir`.

    In a cluster, a Secret of the installation contains the CA. Outside of a cluster, the process creates a CA in
    `selfSignedDir` or in a temporary directory, and the user gives that CA to the clients.

    Args:
        kubeconfig: the path of the kubeconfig file; "" if there is none.
        stack: the stack that removes the temporary directory when it is closed.

    Raises:
        BadObject: if a setting or a file is invalid, or if the certificate cannot be stored.
        ClickException: if the Secret has no CA, or if it cannot be read or written.
    """
    if own.cert_dir:
        return find_mounted_certificate(Path(own.cert_dir)), None
    folder = CertificateFolder(Path(own.self_signed_dir or create_private_folder(stack, "mgpu-")))
    api = Api.connect("") if runs_in_cluster(kubeconfig) else None
    if kubeconfig:
        Api.connect(kubeconfig).close()  # Report an invalid file now, before a worker connects.
    name = f"{own.service}-tls"
    store = SecretStore(api, own.namespace, name) if api else None
    renewer = CertificateRenewer(folder, _names(own), store, REMEDY)
    try:
        renewer.renew()
    except NoAuthority as error:
        text = f"Secret {own.namespace}/{name} has no certificate authority (ca.crt, ca.key): {REMEDY}"
        raise click.ClickException(text) from error
    except OSError as error:
        raise BadObject([Problem(str(folder.path), f"cannot store certificates: {error.strerror}")]) from error
    except (ApiError, Unreachable, RetryLater) as error:
        raise click.ClickException(f"no serving certificate: {error}") from error
    if api:
        api.close()  # The workers open connections of their own.
    return (folder.chain, folder.key), renewer


def _names(own: WebhookSettings | SchedulerSettings) -> set[str]:
    """Return the names and addresses by which clients call this process."""
    service = f"{own.service}.{own.namespace}.svc"
    listening = {own.host} - {"", "0.0.0.0", "::"}
    return {service, f"{service}.cluster.local", "localhost", "127.0.0.1", "::1", *listening, *own.names}
