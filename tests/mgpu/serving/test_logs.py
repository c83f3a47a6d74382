"""Log lines are JSON, one per event."""

import logging
import sys

import orjson

from mgpu.serving.logs import JsonLines


def line(message: str, *args: object, **extra: object) -> dict[str, object]:
    record = logging.getLogger("mgpu.test").makeRecord(
        "mgpu.test", logging.WARNING, __file__, 1, message, args, extra.pop("exc_info", None), extra=extra
    )
    text = JsonLines().format(record)
    assert "\n" not in text
    entry: dict[str, object] = orjson.loads(text)
    return entry


def test_fields_stand_beside_the_message() -> None:
    entry = line("pod %s denied", "p", pod="uid-1", problems=("a", "b"))
    assert (entry["level"], entry["logger"], entry["message"]) == ("warning", "mgpu.test", "pod p denied")
    assert (entry["pod"], entry["problems"]) == ("uid-1", ["a", "b"])


def test_an_exception_is_one_field() -> None:
    try:
        raise ValueError("odd\nindeed")
    except ValueError:
        entry = line("failed", exc_info=sys.exc_info())
    assert "ValueError: odd\nindeed" in str(entry["exception"])


def test_what_json_cannot_hold_is_written_as_text() -> None:
    assert line("x", thing={1, 2}, other=2**70)["thing"] == "{1, 2}"
