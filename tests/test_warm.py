"""Processes of the tests that are forked from a warm interpreter are like executed ones."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.waiting import until

TELL = """
import json, os, sys
own = {"argv": sys.argv, "environ": dict(os.environ), "name": __name__, "files": os.listdir("/proc/self/fd"),
    "session": os.getsid(0) == os.getpid(), "stdin": sys.stdin.read()}
print(json.dumps(own), flush=True)
print("error", file=sys.stderr, flush=True)
sys.exit(7)
"""
SLEEP = "import time; print('begun', flush=True); time.sleep(600)"


@pytest.fixture
def interpreter() -> Iterator[warm.Interpreter]:
    made = warm.Interpreter(["json"])
    yield made
    made.close()


def order(code: str, **options: object) -> dict[str, object]:
    plain = {"environ": {}, "errors": False, "session": False, "orphaned": int(signal.SIGKILL)}
    return {"arguments": ["-c", code, "a", "b c"], **plain, **options}


def test_forked_process_has_the_arguments_environment_files_and_status_of_its_order(
    interpreter: warm.Interpreter, tmp_path: Path
) -> None:
    with (tmp_path / "out").open("wb") as out:
        child = interpreter.fork(order(TELL, environ={"A": "b"}, errors=True, session=True), out.fileno())
        assert child.wait(60) == 7
    assert child.poll() == 7
    told, error = (tmp_path / "out").read_text().splitlines()
    found = json.loads(told)
    assert error == "error"
    assert found["argv"] == ["-c", "a", "b c"]
    assert (found["environ"], found["name"], found["session"], found["stdin"]) == ({"A": "b"}, "__main__", True, "")
    assert len(found["files"]) == 4, "stdin, stdout, stderr and the directory that is listed"


def test_forked_process_that_is_killed_has_the_status_of_popen(interpreter: warm.Interpreter, tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        child = interpreter.fork(order(SLEEP), out.fileno())
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    child.kill()
    assert child.wait(60) == -signal.SIGKILL
    child.terminate()  # does nothing: the number may be another process's by now


def test_forked_process_interpreter_has_ended_gets_the_signal_of_its_order(tmp_path: Path) -> None:
    interpreter = warm.Interpreter(["json"])
    code = f"import signal; signal.signal(15, lambda *_: print('told', flush=True)); {SLEEP}"
    with (tmp_path / "out").open("wb") as out:
        child = interpreter.fork(order(code, orphaned=int(signal.SIGTERM)), out.fileno())
    until(lambda: "begun" in (tmp_path / "out").read_text())
    interpreter.close()
    until(lambda: "told" in (tmp_path / "out").read_text())
    os.kill(child.pid, signal.SIGKILL)
    child.close()
