"""Decodes the JSON of the API server, even if objects of users are nested too deeply for orjson or are not UTF-8.

A list or a watch contains the objects of all users. If one object could make the decoding fail, each replica and agent
would list again forever, and no pod would be placed. `mgpu.kube.client` calls `decode` for each answer and for each
event of a watch.
"""

import re
from typing import Any

import orjson

DEEPEST = 128
"""The number of levels that are kept of a text that is nested too deeply. Fields that mgpu reads have fewer than 20.

The API server accepts 10,000 levels, for example in `metadata.managedFields` of a Pod. The decoder of orjson accepts
1,024 levels, and its encoder accepts 254.
"""

_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_OPENING, _CLOSING, _QUOTE = b"{[", b"}]", b'"'


def decode(text: bytes) -> Any:
    """Return the decoded text. Raises orjson.JSONDecodeError, a ValueError, if the text is not JSON.

    If orjson rejects the text, values below `DEEPEST` levels are replaced by null, bytes that are not UTF-8 are
    replaced by U+FFFD, and the text is decoded again.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return orjson.loads(_flat(text.decode(errors="replace").encode()))


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
