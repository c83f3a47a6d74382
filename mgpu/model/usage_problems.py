"""Why an agent does not know what containers use of its node's cards.

The agent reports the problem in its metrics and on its Node, and `mgpu doctor` explains it.
"""

from enum import StrEnum


class UsageProblem(StrEnum):
    """A problem of measuring, which is the label `reason` of the metric `mgpu_usage_problem`."""

    NO_HOST_PIDS = "no-host-pids"
    """The agent sees the processes of its own container only, so it cannot tell whose process NVML names."""
    PROC_NOT_READABLE = "proc-not-readable"
    """The kernel does not let the agent read in which containers processes run."""
    NO_PERMISSION = "no-permission"
    """NVML does not let the agent list the processes on a card."""
    NVML = "nvml"
    """NVML fails."""
    HANGS = "hangs"
    """A call into the driver does not return."""


EXPLANATIONS = {
    UsageProblem.NO_HOST_PIDS: "processes of other containers cannot be seen, so the use per container is not measured",
    UsageProblem.PROC_NOT_READABLE: "the cgroups of other containers' processes may not be read",
    UsageProblem.NO_PERMISSION: "NVML does not list the processes on a card without a privilege",
    UsageProblem.NVML: "NVML fails when the use of a card is read",
    UsageProblem.HANGS: "a call into the driver hangs, so use is not measured",
}
"""What each problem means, as a clause."""
