"""The control daemon of each card starts, is found by the next agent, restarts and ends."""

import asyncio
import gc
import os
import resource
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from deviceplugin.isolation.mps.control import MOST_LOG, Answer, Control
from deviceplugin.pods.identity import Refused
from tests.deviceplugin.isolation.mps.fake import (
    CARD,
    COMMAND,
    OTHER,
    TIMES,
    kill,
    lives,
    on_loop,
    pid_of,
    ready,
    serving,
    until,
)


@on_loop
async def test_wanted_daemon_answers_and_serves_its_card_alone(folder: Path) -> None:
    warnings: list[str] = []
    async with serving(folder, warnings) as daemons:
        daemons.set_needed({CARD, OTHER}, ())
        await ready(daemons)
        await ready(daemons, OTHER)
    environ = Path(f"/proc/{pid_of(folder)}/environ").read_text().split("\0")
    assert {f"CUDA_VISIBLE_DEVICES={CARD}", f"CUDA_MPS_PIPE_DIRECTORY={folder / CARD / 'pipe'}"} < set(environ)
    assert pid_of(folder) != pid_of(folder, OTHER)
    modes = [stat.S_IMODE(folder.stat().st_mode) for folder in (folder / CARD / "pipe", folder / "shm")]
    assert modes == [0o755, 0o1777]
    assert not warnings


@on_loop
async def test_no_daemon_runs_without_need(folder: Path) -> None:
    async with serving(folder / "none", []) as daemons:
        daemons.set_needed((), ())
        await asyncio.sleep(0)
    assert not (folder / "none").exists()


@on_loop
async def test_daemon_outlives_the_agent_and_is_found_by_the_next(folder: Path) -> None:
    warnings: list[str] = []
    pids = []
    for _ in range(2):
        async with serving(folder, warnings) as daemons:
            daemons.set_needed({CARD}, {CARD})
            await ready(daemons)
            pids.append(pid_of(folder))
        assert lives(pids[0])
    assert pids == [pids[0]] * 2
    assert not warnings


def options_of(folder: Path) -> list[str]:
    arguments = Path(f"/proc/{pid_of(folder)}/cmdline").read_text().split("\0")
    return [one for one in arguments if one in ("-f", "-M")]


@pytest.mark.parametrize(
    ("setting", "old", "options"),
    [
        ("auto", False, ["-f", "-M"]),
        ("auto", True, ["-f"]),
        ("always", False, ["-f", "-M"]),
        ("never", False, ["-f"]),
    ],
)
@on_loop
async def test_daemon_serves_several_users_where_its_program_can(
    folder: Path, setting: str, old: bool, options: list[str]
) -> None:
    warnings: list[str] = []
    if old:
        (folder / CARD).mkdir()
        (folder / CARD / "old").touch()
    async with serving(folder, warnings, multi_user=setting) as daemons:
        daemons.set_needed({CARD}, ())
        await ready(daemons)
        assert options_of(folder) == options
        assert daemons.lack("-M") is ("-M" not in options)
    assert not warnings


@on_loop
async def test_daemon_for_several_users_is_not_started_for_one_where_that_is_required(folder: Path) -> None:
    warnings: list[str] = []
    (folder / CARD).mkdir()
    (folder / CARD / "old").touch()
    async with serving(folder, warnings, multi_user="always") as daemons:
        daemons.set_needed({CARD}, ())
        await until(lambda: warnings)
    assert warnings[0].startswith(f"the MPS daemon of card {CARD} ended: usage: nvidia-cuda-mps-control")


@pytest.mark.parametrize("recorded", [True, False])
@on_loop
async def test_unneeded_daemon_of_an_earlier_agent_ends(folder: Path, recorded: bool) -> None:
    async with serving(folder, []) as daemons:
        daemons.set_needed({CARD}, ())
        await ready(daemons)
    pid = pid_of(folder)
    if not recorded:  # the agent was killed before it recorded the pid
        (folder / CARD / "daemon").unlink()
    async with serving(folder, []) as daemons:
        daemons.set_needed({OTHER}, ())
        await ready(daemons, OTHER)
        await until(lambda: not lives(pid))
    assert lives(pid_of(folder, OTHER))


@on_loop
async def test_daemon_of_another_program_is_used_and_watched(folder: Path) -> None:
    pipe = folder / CARD / "pipe"
    pipe.mkdir(parents=True)
    warnings: list[str] = []
    subprocess.run([*COMMAND, "-d"], env={"CUDA_MPS_PIPE_DIRECTORY": str(pipe)}, check=True)
    pid = pid_of(folder)
    async with serving(folder, warnings) as daemons:
        daemons.set_needed({CARD}, {CARD})
        await ready(daemons)
        assert pid_of(folder) == pid
        kill(pid)
        await until(lambda: warnings)
        await ready(daemons)
    assert pid_of(folder) != pid


@on_loop
async def test_end_of_a_daemon_is_reported_and_it_is_started_again(folder: Path) -> None:
    warnings: list[str] = []
    # It is not asked in this time: that it has ended is seen at once.
    async with serving(folder, warnings, replace(TIMES, health=3600)) as daemons:
        daemons.set_needed({CARD}, {CARD})
        await ready(daemons)
        before = pid_of(folder)
        kill(before)
        await until(lambda: warnings)
        await ready(daemons)
        assert pid_of(folder) != before
    assert warnings == [
        f"the MPS daemon of card {CARD} ended: it wrote nothing; the next attempt to start it is in 0.01 s"
    ]


@on_loop
async def test_daemon_that_does_not_come_up_is_retried_after_growing_pauses(folder: Path) -> None:
    warnings: list[str] = []
    (folder / CARD).mkdir()
    (folder / CARD / "refuse").touch()
    async with serving(folder, warnings, replace(TIMES, longest_pause=30)) as daemons:
        daemons.set_needed({CARD}, ())
        await until(lambda: len(warnings) >= 4)
        with pytest.raises(Refused, match=f"MPS daemon of card {CARD} ended: The server cannot be started"):
            await ready(daemons, seconds=0.01)
        (folder / CARD / "refuse").unlink()
        await ready(daemons)
    pauses = [line.rpartition(" is in ")[2] for line in warnings]
    assert pauses[:4] == ["0.01 s", "0.02 s", "0.04 s", "0.08 s"]


@on_loop
async def test_missing_program_is_reported(folder: Path) -> None:
    warnings: list[str] = []
    async with serving(folder, warnings, command=["/no/such/control"]) as daemons:
        daemons.set_needed({CARD}, ())
        await until(lambda: warnings)
        with pytest.raises(Refused, match="cannot be started: No such file or directory"):
            await ready(daemons, seconds=0.01)


@on_loop
async def test_folder_too_long_for_sockets_is_reported(folder: Path) -> None:
    warnings: list[str] = []
    async with serving(folder / ("x" * 90), warnings) as daemons:
        daemons.set_needed({CARD}, ())
        await until(lambda: warnings)
    assert "too long for the unix sockets" in warnings[0]


@on_loop
async def test_silent_daemon_gets_no_new_clients_and_is_kept_for_those_it_has(folder: Path) -> None:
    warnings: list[str] = []
    async with serving(folder, warnings, replace(TIMES, request=1.5, silent=0.01, start=600)) as daemons:
        daemons.set_needed({CARD}, {CARD})
        await ready(daemons)
        pid = pid_of(folder)
        (folder / CARD / "pipe" / "hang").touch()
        await until(lambda: not daemons.is_healthy(CARD))
        with pytest.raises(Refused, match="does not answer; running containers continue, and no new ones start"):
            await ready(daemons, seconds=0.1)
        assert lives(pid)
        assert len(warnings) == 1
        (folder / CARD / "pipe" / "hang").unlink()
        await ready(daemons)
        assert pid_of(folder) == pid
        (folder / CARD / "pipe" / "hang").touch()
        daemons.set_needed({CARD}, ())
        await until(lambda: not lives(pid))
        await ready(daemons)  # what was in the pipe folder has gone
    assert any("has not answered for 0.01 s and was killed" in line for line in warnings)


@on_loop
async def test_unwanted_daemon_quits_and_is_started_again_when_wanted(folder: Path) -> None:
    warnings: list[str] = []
    async with serving(folder, []) as daemons:
        daemons.set_needed({CARD}, {CARD})
        await ready(daemons)
        before = pid_of(folder)
        daemons.set_needed((), ())
        await until(lambda: not lives(before))
        daemons.set_needed({CARD}, ())
        await ready(daemons)
        assert pid_of(folder) != before
        # Wanted again before it has ended.
        before = pid_of(folder)
        daemons.set_needed((), ())
        await asyncio.sleep(0)
        daemons.set_needed({CARD}, ())
        await ready(daemons)
    assert not warnings


@on_loop
async def test_daemon_that_does_not_quit_is_killed(folder: Path) -> None:
    async with serving(folder, [], replace(TIMES, request=1.0, quit=0.1, start=600)) as daemons:
        daemons.set_needed({CARD}, ())
        await ready(daemons)
        pid = pid_of(folder)
        (folder / CARD / "pipe" / "hang").touch()
        daemons.set_needed((), ())
        await until(lambda: not lives(pid))


@on_loop
async def test_log_files_are_bounded(folder: Path) -> None:
    log = folder / CARD / "log"
    async with serving(folder, []) as daemons:
        daemons.set_needed({CARD}, {CARD})
        await ready(daemons)
        (log / "server.log").write_bytes(os.urandom(MOST_LOG + 1))
        (log / "control.log").write_text("little")
        await until(lambda: (log / "server.log").stat().st_size == 0)
    assert (log / "control.log").read_text() == "little"
    (flags,) = (line.split()[1] for line in _fdinfo(pid_of(folder), 1) if line.startswith("flags"))
    assert int(flags, 8) & os.O_APPEND, "it goes on at the end that there is"


def _fdinfo(pid: int, descriptor: int) -> list[str]:
    return Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().splitlines()


@on_loop
async def test_health_queries_do_not_block_the_event_loop(folder: Path) -> None:
    (folder / CARD / "pipe").mkdir(parents=True)
    control = Control(["/bin/sleep", "3600"], folder, CARD)
    asked = asyncio.create_task(control.check_health(3600))
    for _ in range(10):
        await asyncio.sleep(0.01)
    assert not asked.done()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert await control.check_health(0.1) is Answer.SILENT


def test_other_process_with_its_pid_is_not_the_daemon(folder: Path) -> None:
    (folder / CARD).mkdir()
    control = Control(COMMAND, folder, CARD)
    assert control.pid() is None
    (folder / CARD / "daemon").write_text("1 99999999999")
    assert control.pid() is None
    (folder / CARD / "daemon").write_text("nonsense")
    assert control.pid() is None
    control.kill()


def test_endless_answer_is_not_read_to_its_end(tmp_path: Path) -> None:
    """A root container can listen in place of its card's daemon."""
    control = Control(["sh", "-c", "exec yes"], tmp_path, "GPU-0")
    assert asyncio.run(control.check_health(5.0)) is Answer.ABSENT
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asyncio.run(control.check_health(5.0))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 16 << 10  # KiB; 240 MB were read in a second
    gc.collect()  # a pipe that was left open warns, and fails this test
