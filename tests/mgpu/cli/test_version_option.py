import re

import click
import pytest
from click.testing import CliRunner

from mgpu.cli import kubectl, main
from mgpu.version import own_version


@pytest.mark.parametrize("program", [main.main, kubectl.plugin], ids=["mgpu", "kubectl mgpu"])
def test_version_in_a_checkout_names_version_and_commit(program: click.Command) -> None:
    done = CliRunner().invoke(program, ["--version"])
    assert done.exit_code == 0
    assert re.fullmatch(
        rf"mgpu {re.escape(own_version())} \(development, commit ([0-9a-f]{{12,}}(-dirty)?|unknown)\)\n", done.output
    )
