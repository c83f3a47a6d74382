"""What is decided about one MtgpuPod."""

from dataclasses import dataclass

from mgpu.model.cards import Card

TRUE, FALSE, UNKNOWN = "True", "False", "Unknown"


@dataclass(frozen=True, slots=True)
class Said:
    """A condition: its status, a reason in one word and a sentence for people."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """bound, created, degraded: conditions as they shall be; None: as the API has it. `created` is None where the Pod
    is to be made, since what comes of it only the API server knows.

    bind: the UUID to write as BoundDeviceID; "": none. make: its Pod shall be made on `card` once BoundDeviceID stands.
    delete: its Pod shall be deleted; force: without grace, since the node that could end it is gone.
    finish: it is being deleted and no Pod of it is seen, so that its finalizer may go once the API server has none.
    """

    bound: Said | None = None
    created: Said | None = None
    degraded: Said | None = None
    bind: str = ""
    make: bool = False
    card: Card | None = None
    delete: bool = False
    force: bool = False
    finish: bool = False
