"""Stores files that replicas share in a Secret.

`mgpu.serving` keeps the serving certificates of the webhook and of the scheduler in it.
"""

import base64
from collections.abc import Mapping
from typing import Any

from mgpu.kube.client import Api, ApiError


class SecretStore:
    """A Secret that the installation created. Methods raise ApiError and Unreachable as `Api` does.

    mgpu must not create it: the permission to create Secrets cannot be limited to a name, and a Secret of type
    kubernetes.io/service-account-token contains a token of any service account in the namespace.
    """

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/secrets/{name}"
        self._found: Mapping[str, Any] = {}

    def read(self) -> tuple[Mapping[str, bytes], str]:
        """Return the files and the resourceVersion, or no files and "" if the Secret does not exist."""
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
        """Replace the files. Return False if the Secret has another version or does not exist."""
        meta = {**self._found.get("metadata", {}), "resourceVersion": version}
        data = {key: base64.b64encode(content).decode() for key, content in files.items()}
        try:
            self._api.replace(self._path, {**self._found, "metadata": meta, "data": data})
        except ApiError as error:
            if error.status in (404, 409):
                return False
            raise
        return True
