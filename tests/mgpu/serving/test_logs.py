"""Log lines in JSON."""

import json
import logging

from mgpu.serving.logs import JsonLines, RateLimit, RateLimitFilter


def line(message: str, *args: object, error: Exception | None = None, **extra: object) -> dict[str, object]:
    info = (type(error), error, error.__traceback__) if error else None
    logger = logging.getLogger("mgpu.test")
    record = logger.makeRecord("mgpu.test", logging.WARNING, __file__, 1, message, args, info, extra=extra)
    text = JsonLines().format(record)
    assert "\n" not in text
    entry: dict[str, object] = json.loads(text)
    return entry


def test_extra_fields_are_in_the_log_line() -> None:
    entry = line("pod %s denied", "p", pod="uid-1", problems=("a", "b"))
    assert (entry["level"], entry["logger"], entry["message"]) == ("warning", "mgpu.test", "pod p denied")
    assert (entry["pod"], entry["problems"]) == ("uid-1", ["a", "b"])


def test_exception_is_one_field_of_the_log_line() -> None:
    assert "ValueError: odd\nindeed" in str(line("failed", error=ValueError("odd\nindeed"))["exception"])


def test_value_that_json_cannot_contain_is_logged_as_text() -> None:
    entry = line("x", thing={1, 2}, large=2**70, odd="\ud800")
    assert (entry["thing"], entry["odd"]) == ("{1, 2}", "\ud800")


def test_rate_limit_passes_one_short_record_a_minute_with_the_number_of_the_others() -> None:
    now, seldom = 0.0, RateLimitFilter(lambda: now)

    def passes(level: int, text: str) -> logging.LogRecord | None:
        record = logging.makeLogRecord({"levelno": level, "msg": "%s", "args": (text,)})
        return record if seldom.filter(record) else None

    first = passes(logging.WARNING, 4000 * "x")
    assert first is not None
    assert len(first.getMessage()) == RateLimitFilter.CHARACTERS
    assert [passes(logging.WARNING, "again") for _ in range(3)] == [None] * 3
    assert passes(logging.ERROR, "an error")
    now = RateLimit.SECONDS
    later = passes(logging.WARNING, "later")
    assert later is not None
    assert vars(later)["left_out"] == 3
