"""Asks the scheduler of an installation for what `mgpu inspect`, `mgpu top` and `mgpu explain` show.

The scheduler has the cluster in memory and answers at once, where lists of the API server take seconds and gigabytes in
a large cluster. The request goes through the API server's proxy for Services, with a token of the service account
`mgpu-inspect` (`scheduler.api.commands.readers`). If that is not possible, `Unavailable` says why, and the command
lists the objects of the API server instead.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.errors import MAX_TEXT, shorten
from mgpu.presentation.answers import (
    AUDIENCE,
    CLUSTER_PATH,
    EXPLANATION_PATH,
    READER,
    TOKEN_HEADER,
    USE_PATH,
    VERSION_HEADER,
    ClusterAnswer,
    ExplanationAnswer,
    UnreadableAnswer,
    UseAnswer,
    decode_cluster,
    decode_explanation,
    decode_use,
)
from mgpu.presentation.plain_text import one_line
from mgpu.version import own_version

T = TypeVar("T")
SERVICE = "https:mgpu-scheduler:443"
"""The Service and its port, as the path of the proxy and the `resourceNames` of a role name them."""
_TOKEN_SECONDS = 600
"""The shortest validity that an API server grants."""
_RENEW_SECONDS = 480.0
ANSWER_SECONDS = 20.0
"""The most seconds for which the scheduler may compute an answer. It pauses meanwhile, for kube-scheduler."""
_TAG = re.compile(r'"[0-9a-f]{1,64}"', re.ASCII)
_SECONDS = re.compile(r"\d{1,9}", re.ASCII)
_LONGEST_VERSION = 64


class Unavailable(Exception):
    """The scheduler cannot be asked, or must not answer this user. The text, one printable line, says why.

    Parts of the text may come from a server that somebody has stolen.
    """

    def __init__(self, why: str) -> None:
        super().__init__(shorten(one_line(why[: 2 * MAX_TEXT])))


class OtherVersion(Unavailable):
    """The scheduler has another version than this command."""


@dataclass(frozen=True, slots=True)
class Freshness:
    """How up to date an answer is.

    Attributes:
        age: for how many seconds the data may be outdated.
        note: what the user must know about the replica that answered, or "".
    """

    age: int
    note: str = ""


class SchedulerSource:
    """The scheduler of the installation in a namespace.

    Args:
        api: a connection with the rights of the user.
        seconds: the most seconds until the scheduler begins to answer; None for no limit.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        clock: Callable[[], float] = time.monotonic,
        seconds: float | None = ANSWER_SECONDS,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._seconds = seconds
        self._clock = clock
        self._token = ""
        self._token_at = 0.0
        self._tag = ""

    def cluster(self) -> tuple[ClusterAnswer, Freshness] | None:
        """Return the cluster, or None if nothing has changed since the last call. Raises Unavailable."""
        body, headers = self._get(CLUSTER_PATH, {"If-None-Match": self._tag} if self._tag else {})
        if not body and self._tag:
            return None
        answer = _decoded(decode_cluster, body)
        tag = headers.get("ETag", "")
        self._tag = tag if _TAG.fullmatch(tag) else ""
        return answer, _freshness(headers, answer.replica)

    def forget(self) -> None:
        """Have the next call of `cluster` return the cluster even if nothing has changed."""
        self._tag = ""

    def explanation(
        self, kind: str, namespace: str, name: str, nodes: tuple[str, ...]
    ) -> tuple[ExplanationAnswer, Freshness]:
        """Return the explanation of an object that exists. Raises Unavailable."""
        query = {"kind": kind, "namespace": namespace, "name": name, "node": ",".join(nodes)}
        body, headers = self._get(EXPLANATION_PATH, {}, **query)
        answer = _decoded(decode_explanation, body)
        return answer, _freshness(headers, answer.replica)

    def use(self, nodes: Sequence[str]) -> UseAnswer:
        """Return what the agents of at most `MOST_NODES` nodes have measured. Raises Unavailable."""
        body, _ = self._get(USE_PATH, {}, node=",".join(nodes))
        return _decoded(decode_use, body)

    def _get(self, path: str, headers: Mapping[str, str], **query: str) -> tuple[bytes, Mapping[str, str]]:
        proxy = f"/api/v1/namespaces/{self._namespace}/services/{SERVICE}/proxy{path}"
        try:
            sent = {"Accept-Encoding": "gzip", TOKEN_HEADER: self._valid_token(), **headers}
            body, answered = self._api.fetch(proxy, sent, seconds=self._seconds, **query)
        except (ApiError, Unreachable) as error:
            self._token = ""
            raise Unavailable(error.message if isinstance(error, ApiError) else str(error)) from error
        version = answered.get(VERSION_HEADER, "")
        if version != own_version():
            shown = version[:_LONGEST_VERSION] or "unknown"
            raise OtherVersion(f"the scheduler has version {shown}, and this command {own_version()}")
        return body, answered

    def _valid_token(self) -> str:
        if not self._token or self._clock() - self._token_at > _RENEW_SECONDS:
            path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{READER}/token"
            kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
            spec = {"audiences": [AUDIENCE], "expirationSeconds": _TOKEN_SECONDS}
            self._token_at = self._clock()
            self._token = str((self._api.create(path, {**kind, "spec": spec}).get("status") or {}).get("token") or "")
        return self._token


def _decoded(decode: Callable[[bytes], T], body: bytes) -> T:
    try:
        return decode(body)
    except UnreadableAnswer as error:
        raise Unavailable(f"the answer of the scheduler cannot be read: {error}") from error


def _freshness(headers: Mapping[str, str], replica: str) -> Freshness:
    age = headers.get("Age", "0")
    note = f"the replica of the scheduler that answered does not know reservations ({replica})" if replica else ""
    return Freshness(int(age) if _SECONDS.fullmatch(age) else 0, note)
