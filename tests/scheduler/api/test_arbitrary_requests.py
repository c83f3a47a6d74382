"""Every endpoint answers any request without an internal error."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from werkzeug.test import Client

from tests import builders as b
from tests.arbitrary import JSON, PARTS
from tests.examples import examples
from tests.scheduler.fake import doors, review

EXTENDER = ["/filter", "/prioritize", "/preempt", "/bind", "/gpushare-scheduler/filter", "/gpushare-scheduler/bind"]
PODS = PARTS.map(lambda parts: {**b.share("p"), **parts})
NODES = st.fixed_dictionaries({"items": st.lists(st.just(b.node("n1")) | PARTS | JSON, max_size=3)})
VICTIMS = st.dictionaries(
    st.sampled_from(["n1", "n9"]),
    st.fixed_dictionaries({"Pods": st.lists(PODS | JSON, max_size=2)}, optional={"NumPDBViolations": JSON}) | JSON,
)
ARGUMENTS = st.fixed_dictionaries(
    {"Pod": PODS | PARTS | JSON},
    optional={
        "NodeNames": st.just(["n1", "n9"]) | JSON,
        "Nodes": NODES | JSON,
        "NodeNameToVictims": VICTIMS | JSON,
        "NodeNameToMetaVictims": VICTIMS | JSON,
        "PodName": st.just("p") | JSON,
        "PodNamespace": st.just("default") | JSON,
        "PodUID": st.just("") | JSON,
        "Node": st.just("n1") | JSON,
    },
)
BINDINGS = st.fixed_dictionaries(
    {"metadata": st.just({"name": "p"}) | JSON, "target": st.just({"kind": "Node", "name": "n1"}) | JSON}
)


@pytest.fixture(scope="module")
def both() -> tuple[Client, Client]:
    return doors()


@given(st.sampled_from(EXTENDER), ARGUMENTS | JSON)
@examples(15)
def test_property_extender_always_answers(both: tuple[Client, Client], path: str, arguments: Any) -> None:
    reply = both[1].post(path, data=orjson.dumps(arguments), content_type="application/json")
    assert reply.status_code in (200, 400, 422, 503), reply.text
    assert reply.status_code != 200 or orjson.loads(reply.data) is not None


@given(obj=BINDINGS | JSON, name=st.sampled_from(["", "p"]) | JSON, dry=st.booleans())
@examples(20)
def test_property_binding_admission_always_answers(
    both: tuple[Client, Client], obj: Any, name: Any, *, dry: bool
) -> None:
    body = orjson.dumps(review(obj, name=name, dry_run=dry))
    reply = both[0].post("/bind-admission", data=body, content_type="application/json")
    assert reply.status_code in (200, 400, 503), reply.text
    assert reply.is_json
