"""Defines what the scheduler answers to `mgpu inspect`, `mgpu top` and `mgpu explain`, and how it is written as JSON.

`scheduler.api.commands` writes the answers, and `mgpu.cli.scheduler_source` reads them. Both need the same version of
mgpu, since the JSON has the fields of mgpu's own classes: the command compares `VERSION_HEADER` with its own version.
docs/security.md says who may read the answers.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from mgpu.presentation.card_views import NodeView
from mgpu.presentation.explanations import Explanation
from mgpu.presentation.gang_views import GangView
from mgpu.presentation.overview import Overview

CLUSTER_PATH = "/commands/cluster"
EXPLANATION_PATH = "/commands/explanation"
USE_PATH = "/commands/use"
MOST_NODES = 64
"""The most nodes of one request to `USE_PATH`."""
TOKEN_HEADER = "X-Mgpu-Token"
"""The header with the token. The API server removes the header Authorization when it passes a request on."""
VERSION_HEADER = "X-Mgpu-Version"
AUDIENCE = "mgpu-scheduler"
"""The audience of the tokens, so that the API server does not accept them."""
READER = "mgpu-inspect"
"""The service account whose tokens the scheduler accepts. It has no rights of its own."""


@dataclass(frozen=True, slots=True)
class ClusterAnswer:
    """The cluster as the scheduler knows it.

    Attributes:
        replica: the reason why the replica that answered does not decide, so that it knows no reservations; "" if it
            decides.
    """

    overview: Overview
    gangs: tuple[GangView, ...] = ()
    replica: str = ""


@dataclass(frozen=True, slots=True)
class ExplanationAnswer:
    """The explanation of an object. `replica` is as in `ClusterAnswer`."""

    explanation: Explanation
    replica: str = ""


@dataclass(frozen=True, slots=True)
class UseAnswer:
    """What the agents of some nodes have measured.

    Attributes:
        pages: the lines of each agent's metrics that say what is used, by node. The command reads them, since this
            takes longer than to pass them on, and the scheduler has other work (`mgpu.presentation.measured_use`).
        unknown: the reason for each node whose agent has not answered.
    """

    pages: Mapping[str, str]
    unknown: Mapping[str, str]


_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for a text that is not JSON of the type, is not UTF-8, or is nested too deeply."""
_cluster = msgspec.json.Decoder(ClusterAnswer)
_nodes = msgspec.json.Decoder(NodeView)
_explanation = msgspec.json.Decoder(ExplanationAnswer)
_use = msgspec.json.Decoder(UseAnswer)


class UnreadableAnswer(ValueError):
    """The text is not an answer of this version of mgpu."""


def encode_node(node: NodeView) -> bytes:
    return msgspec.json.encode(node)


def encode_cluster(answer: ClusterAnswer, nodes: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of the answer: first the answer without its nodes, and then each node.

    Args:
        nodes: the nodes as `encode_node` returns them, sorted by name.
    """
    yield msgspec.json.encode(replace(answer, overview=replace(answer.overview, nodes=()))) + b"\n"
    for node in nodes:
        yield node + b"\n"


def decode_cluster(text: bytes) -> ClusterAnswer:
    """Return the answer. Raises UnreadableAnswer."""
    first, _, rest = text.partition(b"\n")
    try:
        answer = _cluster.decode(first)
        nodes = tuple(_nodes.decode_lines(rest))
    except _UNREADABLE as error:
        raise UnreadableAnswer(str(error)) from error
    return replace(answer, overview=replace(answer.overview, nodes=nodes))


def encode_explanation(answer: ExplanationAnswer) -> bytes:
    return msgspec.json.encode(answer)


def decode_explanation(text: bytes) -> ExplanationAnswer:
    """Return the answer. Raises UnreadableAnswer."""
    try:
        return _explanation.decode(text)
    except _UNREADABLE as error:
        raise UnreadableAnswer(str(error)) from error


def encode_use(answer: UseAnswer) -> bytes:
    return msgspec.json.encode(answer)


def decode_use(text: bytes) -> UseAnswer:
    """Return the answer. Raises UnreadableAnswer."""
    try:
        return _use.decode(text)
    except _UNREADABLE as error:
        raise UnreadableAnswer(str(error)) from error
