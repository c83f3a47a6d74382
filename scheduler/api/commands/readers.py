"""Checks who may read the cluster through this process.

The API server passes requests on with its own connection and without the user's credentials, so its address proves only
that somebody may use its proxy. The user therefore sends a token of the service account `mgpu-inspect`, which the API
server issues to those who may create `serviceaccounts/token` for it, and this process has the API server review it. The
user's own credentials never leave the API server, and the token is worthless elsewhere: it is for the audience
`mgpu-scheduler`, and the service account has no rights.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from mgpu.kube import ApiError, Unreachable
from mgpu.model.errors import RetryLater
from mgpu.presentation.answers import AUDIENCE, READER
from mgpu.serving.review import BadRequest

_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
_LONGEST_TOKEN = 8192  # characters
_ACCEPTED_SECONDS = 60.0
"""How long a token that was accepted is not reviewed again, so that `--watch` costs one review a minute."""
_MOST_ACCEPTED = 256
_MOST_REVIEWS = 8
"""The most reviews at the same time. Each occupies a thread of the server until the API server answers."""


class ReviewApi(Protocol):
    """The part of `mgpu.kube.Api` that reviews tokens."""

    def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]: ...


class Readers:
    """Reviews tokens and remembers those that were accepted. Thread-safe.

    Args:
        namespace: The namespace of the installation.
    """

    def __init__(self, api: ReviewApi, namespace: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._user = f"system:serviceaccount:{namespace}:{READER}"
        self._clock = clock
        self._lock = threading.Lock()
        self._reviews = threading.Semaphore(_MOST_REVIEWS)
        self._accepted: dict[bytes, float] = {}  # The digest of each token, with the time at which it was accepted.

    def check(self, token: str) -> None:
        """Return if the bearer of this token may read the cluster.

        Raises:
            BadRequest: if the token is missing or not accepted.
            RetryLater: if the API server does not review the token, or too many tokens are being reviewed.
        """
        if not token or len(token) > _LONGEST_TOKEN:
            raise BadRequest(401, f"the token of the service account {READER} is missing")
        digest = hashlib.sha256(token.encode()).digest()
        with self._lock:
            accepted_at = self._accepted.get(digest)
        if accepted_at is not None and self._clock() - accepted_at < _ACCEPTED_SECONDS:
            return
        if not self._reviews.acquire(blocking=False):
            raise RetryLater("too many tokens are being reviewed")
        try:
            accepted = self._review(token)
        finally:
            self._reviews.release()
        if not accepted:
            raise BadRequest(403, f"this is no valid token of the service account {READER} for {AUDIENCE}")
        with self._lock:
            now = self._clock()
            self._accepted = {key: at for key, at in self._accepted.items() if now - at < _ACCEPTED_SECONDS}
            if len(self._accepted) < _MOST_ACCEPTED:
                self._accepted[digest] = now

    def _review(self, token: str) -> bool:
        spec = {"token": token, "audiences": [AUDIENCE]}
        kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview"}
        try:
            status = self._api.create(_REVIEWS, {**kind, "spec": spec}).get("status") or {}
        except (ApiError, Unreachable) as error:
            raise RetryLater(f"the API server has not reviewed the token: {error}") from error
        user = status.get("user") or {}
        # An API server that does not know audiences leaves `audiences` empty. The token could then be for the API
        # server itself, and so for anybody who has been given it.
        return bool(
            status.get("authenticated") is True
            and AUDIENCE in (status.get("audiences") or ())
            and user.get("username") == self._user
        )
