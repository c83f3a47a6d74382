"""The playground's API server without its HTTP, and how a process reaches it that may die at any call."""

from collections.abc import Callable, Coroutine, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import orjson
import yaml

from mgpu.kube import MERGE_PATCH, ApiError, Unreachable
from playground.apiserver import User
from playground.apiserver import api_errors as server_errors
from playground.apiserver.authorization import Authorizer
from playground.apiserver.calls import Call, parse_path
from playground.apiserver.deletions import Deleter, Lifecycle
from playground.apiserver.kinds import Registry
from playground.apiserver.reads import existing
from playground.apiserver.storage import Storage
from playground.apiserver.subresources import Binder
from playground.apiserver.writes import Writer

Raw = dict[str, Any]
T = TypeVar("T")
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class Crash(BaseException):
    """The process is killed; nothing of it runs on."""


class _Nobody:
    """Admission without webhooks."""

    async def mutate(self, attrs: object, obj: Raw | None, *_: object) -> Raw | None:  # noqa: ARG002
        return obj

    async def validate(self, *_: object) -> None:
        """Accept everything."""


@cache
def _definition(name: str) -> bytes:
    path = Path(__file__).parents[1] / f"manifests/crds/{name}.yaml"
    return orjson.dumps(yaml.safe_load(path.read_text()))


class Cluster:
    """The API server: what `mgpu.kube.Api` offers, of what the scheduler uses, and a look at what it stores.

    refuse: asked before each write, by verb and path; what it raises is the answer.
    """

    def __init__(self) -> None:
        self.storage, self._registry = Storage(), Registry()
        nobody: Any = _Nobody()
        lifecycle = Lifecycle(self.storage, self._registry)
        self._writer = Writer(self.storage, nobody, lifecycle, Authorizer(self.storage, ()))
        self._binder = Binder(self.storage, nobody)
        self._deleter = Deleter(self.storage, nobody, lifecycle)
        self.refuse: Callable[[str, str], None] = lambda *_: None
        for name in ("default", "kube-system"):
            self.create("/api/v1/namespaces", {"metadata": {"name": name}})
        for name in ("mtgpupod", "device"):
            self.create(_CRDS, orjson.loads(_definition(name)))

    def get(self, path: str) -> Raw:
        return _answer(lambda: existing(self.storage, self._call(path))).obj

    def create(self, path: str, body: Mapping[str, Any]) -> Raw:
        self.refuse("create", path)
        return _run(self._writer.create(self._call(path, body))).obj

    def patch(self, path: str, body: object, content_type: str = MERGE_PATCH) -> Raw:
        self.refuse("patch", path)
        return _run(self._writer.patch(self._call(path, body, content_type)))[0].obj

    def replace(self, path: str, body: Mapping[str, Any]) -> Raw:
        self.refuse("replace", path)
        return _run(self._writer.update(self._call(path, body))).obj

    def delete(self, path: str, body: Mapping[str, Any] | None = None) -> Raw:
        self.refuse("delete", path)
        _run(self._deleter.delete(self._call(path, body)))
        return {}

    def bind(self, raw: Raw, node: str, annotations: Mapping[str, str]) -> None:
        meta = {key: raw["metadata"][key] for key in ("namespace", "name", "uid")}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {**meta, "annotations": dict(annotations)}}
        call = self._call(f"{pod_path(raw)}/binding", {**body, "target": {"kind": "Node", "name": node}})
        _run(self._binder.bind(call, legacy=False))

    def all(self, resource: str) -> list[Raw]:
        items = self.storage.collection(resource).items
        return [items[key].obj for key in sorted(items)]

    def _call(self, path: str, body: object = None, content_type: str = "application/json") -> Call:
        found = parse_path(path, self._registry)
        assert found is not None, path
        text = b"" if body is None else orjson.dumps(body)
        return Call(found, User("admin", ()), {}, content_type=content_type, body=text)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Nothing is waited for without webhooks."""
    return _answer(lambda: _finished(work))


def _finished(work: Coroutine[Any, Any, T]) -> T:
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it waits for something")


def _answer(call: Callable[[], T]) -> T:
    try:
        return call()
    except server_errors.ApiError as error:
        raise ApiError(error.code, error.reason, error.message) from error


class Wire:
    """The API server as one process reaches it, until it dies or cannot.

    left: calls that go well; None: all. Then: `crash` or Unreachable, `after` the call has come through or before it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.calls = 0
        self.left: int | None = None
        self.crash = self.after = False

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._cluster, name)

        def called(*args: Any) -> Any:
            self.calls += 1
            if self.left is None:
                return call(*args)
            self.left -= 1
            if self.left >= 0:
                return call(*args)
            if self.after:
                call(*args)
            if self.crash:
                raise Crash
            self.left = None
            raise Unreachable("no answer")

        return called

    def fail(self, left: int | None, *, crash: bool = False, after: bool = False) -> None:
        self.left, self.crash, self.after = left, crash, after


def pod_path(raw: Raw) -> str:
    return f"/api/v1/namespaces/{raw['metadata']['namespace']}/pods/{raw['metadata']['name']}"
