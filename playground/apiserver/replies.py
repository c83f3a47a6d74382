"""JSON replies, with what admission had to warn about."""

import orjson
from aiohttp import web

from playground.apiserver.storage import Object


def reply(code: int, document: Object | bytes, warnings: list[str]) -> web.Response:
    body = document if isinstance(document, bytes) else orjson.dumps(document)
    response = web.Response(status=code, body=body, content_type="application/json")
    for text in dict.fromkeys(warnings):
        response.headers.add("Warning", _header(text))
    return response


def _header(text: str) -> str:
    quoted = " ".join(text.split()).replace("\\", "\\\\").replace('"', '\\"')
    return f'299 - "{quoted}"'
