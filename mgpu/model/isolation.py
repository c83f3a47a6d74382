"""The isolation back ends: the names by which settings, labels and pods choose one.

The agent chooses a back end for its node (`deviceplugin.isolation`), and reports it in the node's Device and in labels
of the Node. docs/isolation.md compares the back ends.
"""

from mgpu.model.gpu_requests import Requirement

NONE, MPS, HAMI_CORE, DRIVER, AUTO = "none", "mps", "hami-core", "driver", "auto"
STRONGEST_FIRST = (DRIVER, HAMI_CORE, MPS)
"""The back ends in the order in which `auto` prefers them. The driver's limits are the only ones that a program in the
container cannot remove."""

CHOICES = (NONE, MPS, HAMI_CORE, DRIVER, AUTO)
"""The values of the setting `deviceplugin.isolation` and of the Node's label `ISOLATION_LABEL`."""

ISOLATION_LABEL = "mgpu.io/isolation"
"""The label by which an administrator overrides the setting for a Node. On a Device, the label names the back end that
the agent has chosen: `none` or one of `STRONGEST_FIRST`."""

HAMI_CORE_LABEL = "mgpu.io/hami-core"
"""The label of a Node that says whether its agent can apply HAMi-core to a pod that names it: `true` or `false`. A Node
without the label cannot."""

NEEDS_HAMI_CORE = Requirement(HAMI_CORE_LABEL, ("true",), "the node does not offer HAMi-core (label mgpu.io/hami-core)")
"""The requirement of a pod that names HAMi-core, in `GpuRequest.requirements`."""
