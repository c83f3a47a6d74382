"""The settings of a process from a file and flags."""

from pathlib import Path

import pytest

from mgpu import dialects
from mgpu.cli.process_settings import read_settings
from mgpu.model.errors import BadObject
from mgpu.model.pods import read_pod
from tests.builders import share


def test_flags_set_the_block_of_the_process_and_policies_the_top_level(tmp_path: Path) -> None:
    file = tmp_path / "mgpu.yaml"
    file.write_text("dialects: {mgpu: {MGPUPolicy: binpack}}")
    flags = {"cert_dir": "/tls", "port": None, "card_policy": "spread", "node_policy": "spread"}
    settings = read_settings(file, {"MGPU_SCHEDULER__PORT": "1"}, flags, "scheduler")
    assert (settings.scheduler.cert_dir, settings.scheduler.port, settings.node_policy) == ("/tls", 1, "spread")
    request = dialects.read_request(read_pod(share()), settings)
    assert request is not None
    assert dialects.card_policy(request, settings) == "spread", "the flag holds over the dialect's setting"


def test_missing_settings_file_is_a_bad_object(tmp_path: Path) -> None:
    with pytest.raises(BadObject, match="cannot be read: No such file"):
        read_settings(tmp_path / "nowhere.yaml", {}, {})
