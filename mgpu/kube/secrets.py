"""Stores files in a Secret, so that replicas share the files.

The webhook and the scheduler each store their serving certificate in a Secret of their own (`mgpu.cli.certificate`).
`mgpu doctor` reads the Secrets.
"""

import base64
from collections.abc import Mapping
from typing import Any

from mgpu.kube.client import Api, ApiError


class SecretStore:
    """A Secret that the installation has created. Methods raise ApiError and Unreachable as `Api` does.

    mgpu must not have the permission to create Secrets, because RBAC cannot limit that permission to a name. A user
    who can create a Secret of the type kubernetes.io/service-account-token gets a token of any service account in the
    namespace.
    """

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/secrets/{name}"
        self._found: Mapping[str, Any] = {}

    def read(self) -> tuple[Mapping[str, bytes], str]:
        """Return the files by name, and the resourceVersion. If the Secret does not exist, return no files and ""."""
        try:
            secret = self._api.get(self._path)
        except ApiError as error:
            if error.status == 404:
                return {}, ""
            raise
        self._found = secret
        files = {name: base64.b64decode(text or "") for name, text in (secret.get("data") or {}).items()}
        return files, secret["metadata"]["resourceVersion"]

    def write(self, files: Mapping[str, bytes], version: str) -> bool:
        """Replace the files. Return False if the Secret has another version or does not exist.

        Call `read` before, because the other fields of the Secret are written as `read` has found them.

        Args:
            version: The resourceVersion that `read` returned.
        """
        meta = {**self._found.get("metadata", {}), "resourceVersion": version}
        data = {key: base64.b64encode(content).decode() for key, content in files.items()}
        try:
            self._api.replace(self._path, {**self._found, "metadata": meta, "data": data})
        except ApiError as error:
            if error.status in (404, 409):
                return False
            raise
        return True
