"""Decodes the JSON of the API server, whatever users have put into their objects.

A list or a watch contains the objects of all users. One object that cannot be decoded must not hide the others: every
replica and agent would list again for ever, and nothing would be decided.
"""

import re
from typing import Any

import orjson

DEEPEST = 128
"""Levels of nesting that are kept where a text is nested too deeply. Objects that mgpu reads have fewer than 20.

The API server accepts 10,000 levels, for example in `metadata.managedFields` of a Pod. The decoder accepts 1,024 and
the encoder 254.
"""

_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_OPENING, _CLOSING, _QUOTE = b"{[", b"}]", b'"'


def decode(text: bytes) -> Any:
    """Return the decoded text.

    Of a text that is nested too deeply, what is below `DEEPEST` levels is replaced by null. Bytes that are not UTF-8
    are replaced by U+FFFD. Raises orjson.JSONDecodeError, a ValueError, where the text is not JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return orjson.loads(_flat(text.decode(errors="replace").encode()))


def _flat(text: bytes) -> bytes:
    """Return the text without what is below `DEEPEST` levels. 1 MiB takes some 20 ms: a user can send many."""
    import numpy as np  # not at the top: webhook and agents save its memory unless they are attacked

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
