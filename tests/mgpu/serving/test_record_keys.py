"""Public keys in a ConfigMap are read as the processes read them from files."""

import pytest

from mgpu.model.errors import BadObject
from mgpu.serving.record_keys import SINCE, read_public_keys

TIME = "2026-01-31T12:00:00Z"


def test_time_that_ends_in_a_line_break_is_read_as_in_a_file() -> None:
    assert read_public_keys("mgpu-record-keys", {SINCE: f"{TIME}\n"}).since == TIME


@pytest.mark.parametrize("text", ["", "2026-01-31", f"{TIME} {TIME}"])
def test_time_that_is_invalid_is_an_error_with_its_path(text: str) -> None:
    with pytest.raises(BadObject, match=r"mgpu-record-keys\[since\]: must be a time such as"):
        read_public_keys("mgpu-record-keys", {SINCE: text})
