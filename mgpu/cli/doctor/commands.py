"""Checks that `mgpu inspect`, `top` and `explain` get their answers from the scheduler (docs/kubectl.md).

`mgpu doctor` runs this check. `collection` calls `ask`. Without the scheduler's answer the commands work too, but list
all objects of the API server, so no finding is a failure.
"""

from collections.abc import Iterator

from mgpu.cli.doctor.installation import CommandsAnswer, Finding, Installation, Level
from mgpu.cli.scheduler_source import OtherVersion, SchedulerSource, Unavailable
from mgpu.kube import Api, ApiError
from mgpu.presentation.answers import READER
from mgpu.serving.callers import REFUSES

CHECK = "commands"
_FORBIDDEN = 403
_LISTS = "inspect, top and explain list the objects of the API server"


def ask(api: Api, namespace: str) -> CommandsAnswer:
    """Ask the scheduler for the cluster, as `mgpu inspect` does."""
    try:
        found = SchedulerSource(api, namespace).cluster()
    except OtherVersion as error:
        return CommandsAnswer(str(error), is_other_version=True)
    except Unavailable as error:
        cause = error.__cause__
        return CommandsAnswer(str(error), is_forbidden=isinstance(cause, ApiError) and cause.status == _FORBIDDEN)
    assert found is not None, "the first answer cannot be unchanged"
    return CommandsAnswer(note=found[1].note)


def check_commands(installation: Installation) -> Iterator[Finding]:
    """Warn if the scheduler does not answer, may not answer this user, has another version, or does not decide."""
    answer = installation.commands
    if answer is None:
        return
    if REFUSES in answer.problem:
        text = f"the scheduler does not answer, so {_LISTS}: {answer.problem}"
        remedy = "see the check of the webhook: the API server calls the scheduler from the same address"
        yield Finding(CHECK, Level.WARNING, text, remedy)
    elif answer.is_forbidden:
        text = f"you may not ask the scheduler, so {_LISTS}: {answer.problem}"
        remedy = f'bind the ClusterRole and the Role {READER} to yourself (docs/install.md, "Who may run the commands")'
        yield Finding(CHECK, Level.WARNING, text, remedy)
    elif answer.is_other_version:
        yield Finding(CHECK, Level.WARNING, f"{answer.problem}, so {_LISTS}", "install the scheduler's version here")
    elif answer.problem:
        text = f"the scheduler does not answer, so {_LISTS}: {answer.problem}"
        remedy = f"{installation.kubectl} get service,endpoints,serviceaccounts; see the other checks"
        yield Finding(CHECK, Level.WARNING, text, remedy)
    elif answer.note:
        remedy = f"{installation.kubectl} get lease,pods; wait until a replica decides"
        yield Finding(CHECK, Level.WARNING, answer.note, remedy)
    else:
        yield Finding(CHECK, Level.OK, "the scheduler answers inspect, top and explain")
