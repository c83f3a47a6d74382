"""Whatever a stolen scheduler answers, the command says in a short, printable line why it does not use the answer."""

from collections.abc import Mapping
from typing import Any

import pytest

from mgpu.cli.scheduler_source import SchedulerSource, Unavailable
from mgpu.kube import ApiError
from mgpu.presentation.answers import VERSION_HEADER, ClusterAnswer, encode_cluster
from mgpu.presentation.overview import Overview
from mgpu.version import own_version
from tests.clock import Clock

EMPTY = b"".join(encode_cluster(ClusterAnswer(Overview((), (), {}, {}, (), (), {}, {})), ()))
GOOD = {VERSION_HEADER: own_version()}


class Answering:
    """An API server that grants each token. answer: the body and the headers, or the error, of the scheduler."""

    def __init__(self, body: bytes = EMPTY, headers: Mapping[str, str] = GOOD, error: Exception | None = None) -> None:
        self.body, self.headers, self.error = body, headers, error
        self.sent: list[Mapping[str, str]] = []

    def create(self, path: str, body: Any) -> dict[str, Any]:
        assert path.endswith("/token")
        assert body["spec"]["audiences"] == ["mgpu-scheduler"]
        return {"status": {"token": "t"}}

    def fetch(self, _path: str, headers: Mapping[str, str], **_: object) -> tuple[bytes, Mapping[str, str]]:
        self.sent.append(headers)
        if self.error is not None:
            raise self.error
        return self.body, self.headers


def source_of(answering: Any) -> SchedulerSource:
    return SchedulerSource(answering, "mgpu-system", Clock())


def test_an_empty_cluster_is_read() -> None:
    found = source_of(Answering()).cluster()
    assert found is not None
    assert found[0].overview.nodes == ()


HOSTILE = "\x1b]0;owned\x07\x9b2J\r" + "x" * 100_000
CASES = {
    "deep JSON": Answering(b'{"x":' + b"[" * 100_000),
    "deep JSON of a node": Answering(EMPTY + b'{"x":' + b"[" * 100_000),
    "no UTF-8": Answering(b'{"replica":"\xff"}'),
    "no JSON": Answering(b"<html>"),
    "nothing": Answering(b""),
    "a version": Answering(headers={VERSION_HEADER: HOSTILE}),
    "no version": Answering(headers={}),
    "a refusal": Answering(error=ApiError(503, "", HOSTILE)),
    "a wrong value": Answering(b'{"' + HOSTILE.encode() + b'":1}'),
    "a wrong type": Answering(EMPTY.replace(b'"gangs":[]', b'"gangs":"' + HOSTILE.encode() + b'"')),
}


@pytest.mark.parametrize("case", CASES)
def test_an_answer_that_cannot_be_used_is_reported_in_one_short_line(case: str) -> None:
    source = source_of(CASES[case])
    for ask in (source.cluster, lambda: source.explanation("Pod", "default", "p", ())):
        with pytest.raises(Unavailable) as error:
            ask()
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 1200


@pytest.mark.parametrize("age", ["9" * 5000, "-1", "²", "", "x"])
def test_an_age_that_is_no_number_of_seconds_is_left_out(age: str) -> None:
    found = source_of(Answering(headers={**GOOD, "Age": age})).cluster()
    assert found is not None
    assert found[1].age == 0


def test_an_age_is_read() -> None:
    found = source_of(Answering(headers={**GOOD, "Age": "17"})).cluster()
    assert found is not None
    assert found[1].age == 17


def test_only_a_tag_of_the_scheduler_is_sent_back() -> None:
    answering = Answering(headers={**GOOD, "ETag": '"x\r\n y"'})
    source = source_of(answering)
    for _ in range(2):
        assert source.cluster() is not None
    assert all("If-None-Match" not in headers for headers in answering.sent)
    answering.headers = {**GOOD, "ETag": '"0123abcd"'}
    for _ in range(2):
        source.cluster()
    assert answering.sent[-1]["If-None-Match"] == '"0123abcd"'


def test_an_empty_answer_means_no_change_only_if_a_tag_was_sent() -> None:
    answering = Answering(headers={**GOOD, "ETag": '"0123abcd"'})
    source = source_of(answering)
    source.cluster()
    answering.body = b""
    assert source.cluster() is None
    source.forget()
    with pytest.raises(Unavailable):
        source.cluster()
