"""How the webhook reads an MtgpuPod: from the API server, at the moment of the review."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from mgpu.dialects import mtgpu
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.errors import RetryLater
from webhook.pods_of_mtgpupods import Find

SECONDS = 3.0
"""How long the API server may take. The API server itself waits 5 s for the review."""


def finder(api: Api) -> Find:
    """Return the function that reads MtgpuPods by `api`."""

    def find(namespace: str, name: str) -> Mapping[str, Any] | None:
        where = f"namespaces/{quote(namespace, safe='')}/mtgpupods/{quote(name, safe='')}"
        try:
            return api.get(f"/apis/{mtgpu.API_VERSION}/{where}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise RetryLater(f"{mtgpu.KIND} {namespace}/{name} cannot be read: {error}") from error
        except Unreachable as error:
            raise RetryLater(f"{mtgpu.KIND} {namespace}/{name} cannot be read: {error}") from error

    return find
