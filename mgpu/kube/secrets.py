"""A Secret as the place of files that replicas share."""

import base64
from collections.abc import Mapping

from mgpu.kube.client import Api, ApiError


class SecretStore:
    """A Secret of type kubernetes.io/tls with further keys. Calls raise ApiError and Unreachable as `Api` does."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._all = f"/api/v1/namespaces/{namespace}/secrets"

    def read(self) -> tuple[Mapping[str, bytes], str]:
        """Its files and resourceVersion; no files and "" where there is none."""
        try:
            secret = self._api.get(f"{self._all}/{self._name}")
        except ApiError as error:
            if error.status == 404:
                return {}, ""
            raise
        files = {name: base64.b64decode(text or "") for name, text in (secret.get("data") or {}).items()}
        return files, secret["metadata"]["resourceVersion"]

    def write(self, files: Mapping[str, bytes], version: str) -> bool:
        """Create ("") or replace it; False where it is no longer at `version`."""
        meta = {"name": self._name, "namespace": self._namespace, **({"resourceVersion": version} if version else {})}
        data = {name: base64.b64encode(content).decode() for name, content in files.items()}
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls",
            "metadata": meta,
            "data": data,
        }
        try:
            if version:
                self._api.replace(f"{self._all}/{self._name}", secret)
            else:
                self._api.create(self._all, secret)
        except ApiError as error:
            if error.status in (404, 409):
                return False
            raise
        return True
