"""Decodes the JSON of the API server, even if objects of users are nested too deeply for orjson or are not UTF-8.

A list or a watch contains the objects of all users. If one object could make the decoding fail, each replica and agent
would list again forever, and no pod would be placed. `mgpu.kube.client` calls `decode_list` for each page of a list,
`decode_object` for each event of a watch, and `decode` for every other answer.

A scheduler reads every pod of the cluster when it starts. So the items of a page are decoded one by one, each when the
caller needs it: a decoded page takes up to 25 times as much memory as its text, and decoding takes three times as long
if it cannot use the memory of the last item again. And `metadata.managedFields`, nearly half of a pod, is left out
where that is cheap, since nothing in mgpu reads it.
"""

import re
from collections.abc import Iterator
from typing import Any

import orjson

DEEPEST = 128
"""The number of levels that are kept of a text that is nested too deeply. Fields that mgpu reads have fewer than 20.

The API server accepts 10,000 levels, for example in `metadata.managedFields` of a Pod. The decoder of orjson accepts
1,024 levels, and its encoder accepts 254.
"""

_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_OPENING, _CLOSING, _QUOTE = b"{[", b"}]", b'"'
_FIRST_ITEM = re.compile(rb'"items":\[(\{(?:"apiVersion":"[^"\\]*","kind":"[^"\\]*",)?"metadata":\{)')
"""The beginning of the items of a list. Kinds with a CustomResourceDefinition name their kind in each item."""
_MANAGED_FIELDS = b',"managedFields":['
_AFTER_LIST = re.compile(rb'\]\}?,"[A-Za-z]')
"""The end of a list, and the key that follows it in the same object or in the one around it.

In valid JSON this is never part of a string: its quote would be the end of the string, which no letter can follow.
"""


def decode(text: bytes) -> Any:
    """Return the decoded text. Raises orjson.JSONDecodeError, a ValueError, if the text is not JSON.

    If orjson rejects the text, values below `DEEPEST` levels are replaced by null, bytes that are not UTF-8 are
    replaced by U+FFFD, and the text is decoded again.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return orjson.loads(_flat(text.decode(errors="replace").encode()))


def decode_object(text: bytes) -> Any:
    """Return the decoded text of an object, or of an event with an object, without its `managedFields`."""
    return decode(_without_managed_fields(text))


def decode_list(text: bytes) -> tuple[dict[str, Any], Iterator[Any]]:
    """Return the fields of a list except `items`, and an iterator of its items without their `managedFields`.

    Both the call and the iterator raise orjson.JSONDecodeError, a ValueError, if the text is not JSON. The iterator may
    raise it after some items.
    """
    first = _FIRST_ITEM.search(text)
    end = _end_of_items(text)
    fields = None
    if first is not None and end > first.end():
        fields = _decode_or_none(text[: first.start(1)] + text[end:])
    if first is None or not isinstance(fields, dict) or fields.pop("items", None) != []:
        whole = decode(text)
        fields = whole if isinstance(whole, dict) else {}
        return fields, iter(fields.pop("items", None) or ())
    return fields, _items(text, first.start(1), end, b"}," + first[1])


def _end_of_items(text: bytes) -> int:
    """Return the position after the last item. It is only a guess: the caller decodes what is before and after."""
    if text.endswith((b"]}", b"]}\n")):
        return text.rfind(b"]")
    return text.rfind(b'],"kind":"')


def _items(text: bytes, start: int, end: int, separator: bytes) -> Iterator[Any]:
    """Yield the items between two positions.

    The text is divided at each `separator`, which is the end of an object, a comma, and the first bytes of the first
    item. It could also occur inside of an item, but then the part before it is not valid JSON, since a bracket stays
    open in it. If any part is not valid JSON, the whole text is decoded. So the items are always those of the list.
    """
    count = 0
    while start < end:
        found = text.find(separator, start, end)
        stop = found + 1 if found >= 0 else end
        try:
            item = decode_object(text[start:stop])
        except orjson.JSONDecodeError:
            yield from decode(text)["items"][count:]
            return
        yield item
        count += 1
        start = stop + 1


def _without_managed_fields(text: bytes) -> bytes:
    """Return the text without the list `managedFields`, if the list contains no other brackets.

    The list that the API server writes has none, unless a name in it has one, which is rare. The text may be any JSON.
    """
    start = text.find(_MANAGED_FIELDS)
    if start < 0:
        return text
    end = text.find(b"]", start)
    if text.find(b"[", start + len(_MANAGED_FIELDS), end) >= 0 or not _AFTER_LIST.match(text, end):
        return text
    return text[:start] + text[end + 1 :]


def _decode_or_none(text: bytes) -> Any:
    try:
        return decode(text)
    except orjson.JSONDecodeError:
        return None


def _flat(text: bytes) -> bytes:
    """Return the text with null in place of values below `DEEPEST` levels.

    A text of 1 MiB must take only about 20 ms, because a user can create many such objects.
    """
    import numpy as np  # The import is here, because the webhook and the agents need numpy only in this rare case.

    signs = np.frombuffer(_ESCAPE.sub(b"__", text), np.uint8)
    within = np.logical_xor.accumulate(signs == ord(_QUOTE))
    steps = np.isin(signs, list(_OPENING)).astype(np.int8) - np.isin(signs, list(_CLOSING))
    steps[within] = 0
    below = np.cumsum(steps, dtype=np.int32) > DEEPEST
    edges = np.flatnonzero(np.diff(below, prepend=False)).tolist()
    kept: list[bytes] = []
    start = 0
    for opening, closing in zip(edges[::2], edges[1::2], strict=False):
        kept += (text[start:opening], b"null")
        start = closing + 1
    kept.append(text[start:])
    return b"".join(kept)
