"""`mgpu doctor` says whether the commands get their answers from the scheduler."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from mgpu.cli.doctor.commands import ask, check_commands
from mgpu.cli.doctor.installation import Finding, Installation, Level
from mgpu.kube import ApiError, Unreachable
from mgpu.presentation.answers import VERSION_HEADER, ClusterAnswer, encode_cluster
from mgpu.presentation.overview import Overview
from mgpu.serving.callers import Callers
from mgpu.settings import load_settings
from mgpu.version import own_version

REFUSAL = Callers("scheduler.apiServers").refusal("192.0.2.9")


class Api:
    """An API server whose proxy answers with `answer`, or raises it."""

    def __init__(self, answer: bytes | Exception, version: str) -> None:
        self.answer = answer
        self.version = version

    def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        assert path == "/api/v1/namespaces/gpus/serviceaccounts/mgpu-inspect/token"
        return {**body, "status": {"token": "valid"}}

    def fetch(self, path: str, headers: Mapping[str, str], **_: object) -> tuple[bytes, Mapping[str, str]]:
        assert path == "/api/v1/namespaces/gpus/services/https:mgpu-scheduler:443/proxy/commands/cluster"
        assert headers["X-Mgpu-Token"] == "valid"
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer, {VERSION_HEADER: self.version}


def finding(answer: bytes | Exception, version: str = own_version()) -> Finding:
    answered = ask(Api(answer, version), "gpus")  # type: ignore[arg-type]
    (found,) = check_commands(Installation("gpus", datetime.now(UTC), "1", load_settings(), commands=answered))
    return found


def cluster(replica: str = "") -> bytes:
    return b"".join(encode_cluster(ClusterAnswer(Overview(()), replica=replica), ()))


def test_a_scheduler_that_answers_is_ok() -> None:
    assert finding(cluster()) == Finding("commands", Level.OK, "the scheduler answers inspect, top and explain")


@pytest.mark.parametrize(
    ("answer", "version", "message", "remedy"),
    [
        (ApiError(403, "Forbidden", "no services/proxy"), "", "you may not ask the scheduler", "mgpu-inspect"),
        (ApiError(403, "", REFUSAL), "", "the scheduler does not answer", "the check of the webhook"),
        (ApiError(503, "", "no endpoints"), "", "the scheduler does not answer", "kubectl -n gpus get service"),
        (Unreachable("silent"), "", "the scheduler does not answer", "kubectl -n gpus get service"),
        (b"{}", own_version(), "cannot be read", "kubectl -n gpus get service"),
        (cluster(), "0.0.9", "the scheduler has version 0.0.9", "install the scheduler's version"),
        (cluster("it does not lead"), own_version(), "does not know reservations (it does not lead)", "get lease,pods"),
    ],
)
def test_what_keeps_the_commands_from_the_scheduler_is_a_warning(
    answer: bytes | Exception, version: str, message: str, remedy: str
) -> None:
    found = finding(answer, version)
    assert (found.check, found.level) == ("commands", Level.WARNING)
    assert message in found.message
    assert remedy in found.remedy
