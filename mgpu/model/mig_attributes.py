"""The attributes of MIG instances as devices of Dynamic Resource Allocation.

The agent publishes them (`mgpu.model.mig_resource_slices`), and the scheduler process computes them to evaluate the
selectors and constraints of claims.
"""

from mgpu.model.mig_devices import MigOffer
from mgpu.model.resource_slices import Attribute, attributes

TYPE = "type"
PROFILE = "profile"
MIG_TYPE = "mig"
"""The value of the attribute `TYPE` of MIG instances. Devices that are whole cards do not have this attribute."""


def mig_attributes(offer: MigOffer) -> dict[str, Attribute]:
    """Return the attributes of an instance without the prefix of the driver: those of its card, and its own."""
    own: dict[str, Attribute] = {TYPE: MIG_TYPE, PROFILE: offer.instance.profile, "start": offer.instance.start}
    return {**attributes(offer.card), **own}
