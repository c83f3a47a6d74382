"""HTTP verbs on resources."""

import orjson
from aiohttp import web

from playground.apiserver.deletions import Deleter
from playground.apiserver.errors import method_not_allowed, no_such_path
from playground.apiserver.reads import existing, list_items, render, render_list
from playground.apiserver.replies import reply
from playground.apiserver.routes import Call
from playground.apiserver.storage import Item, Object, Storage
from playground.apiserver.tables import table
from playground.apiserver.watches import Render, Watch
from playground.apiserver.writes import Writer


def _wants_table(call: Call) -> bool:
    return "as=Table" in call.accept and "v=v1" in call.accept


def _partial(item: Item) -> bytes:
    head: Object = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
    return orjson.dumps(head | {"metadata": item.obj["metadata"]})


class Handlers:
    def __init__(self, storage: Storage, writer: Writer, deleter: Deleter, bookmark_every: float) -> None:
        self._storage, self._writer, self._deleter = storage, writer, deleter
        self._bookmark_every = bookmark_every

    async def handle(self, request: web.Request, call: Call) -> web.StreamResponse:
        path, method = call.path, request.method
        if path.subresource and path.subresource not in path.kind.subresources:
            raise no_such_path()
        if path.name:
            return await self._one(method, call)
        if method == "GET" and call.flag("watch"):
            return await self._watch(request, call)
        if method == "GET":
            return self._list(call)
        if method == "DELETE":
            items = await self._deleter.delete_collection(call)
            return reply(200, render_list(items, {"resourceVersion": str(self._storage.rv)}, path.kind), call.warnings)
        if method != "POST" or (path.kind.namespaced and not path.namespace):
            raise method_not_allowed()
        return self._item(201, await self._writer.create(call), call)

    async def _one(self, method: str, call: Call) -> web.StreamResponse:
        if method == "GET":
            return self._get(call)
        if method == "PUT":
            return self._item(200, await self._writer.update(call), call)
        if method == "PATCH":
            item, new = await self._writer.patch(call)
            return self._item(201 if new else 200, item, call)
        if method == "DELETE" and not call.path.subresource:
            result = await self._deleter.delete(call)
            return self._item(200, result, call) if isinstance(result, Item) else reply(200, result, call.warnings)
        raise method_not_allowed()

    def _get(self, call: Call) -> web.Response:
        item = existing(self._storage, call)
        if _wants_table(call):
            rv = {"resourceVersion": item.obj["metadata"]["resourceVersion"]}
            return reply(200, table([item], call.path.kind, rv, call.query.get("includeObject", "Metadata")), [])
        return self._item(200, item, call)

    def _list(self, call: Call) -> web.Response:
        items, metadata = list_items(self._storage, call)
        if _wants_table(call):
            return reply(200, table(items, call.path.kind, metadata, call.query.get("includeObject", "Metadata")), [])
        return reply(200, render_list(items, metadata, call.path.kind), [])

    async def _watch(self, request: web.Request, call: Call) -> web.StreamResponse:
        show: Render | None = None
        if _wants_table(call):
            show = _TableLines(call)
        elif "as=PartialObjectMetadata" in call.accept:
            show = _partial
        lines = Watch(self._storage, call, show, self._bookmark_every).lines()
        response = web.StreamResponse(
            headers={"Content-Type": "application/json", "Cache-Control": "no-cache, private"}
        )
        await response.prepare(request)
        try:
            async for line in lines:
                await response.write(line)
            await response.write_eof()
        except (ConnectionError, TimeoutError):
            pass  # its client has gone
        finally:
            await lines.aclose()
        return response

    @staticmethod
    def _item(code: int, item: Item, call: Call) -> web.Response:
        return reply(code, render(item, call.path.kind), call.warnings)


class _TableLines:
    """One-row tables; only the first has the columns."""

    def __init__(self, call: Call) -> None:
        self._call, self._first = call, True

    def __call__(self, item: Item) -> bytes:
        rv = {"resourceVersion": item.obj["metadata"]["resourceVersion"]}
        header, self._first = self._first, False
        include = self._call.query.get("includeObject", "Metadata")
        return table([item], self._call.path.kind, rv, include, header=header)
