"""Answers the kubelet's calls of Allocate and PreStartContainer.

`plugin.plugin_set` calls `make_allocator` for each resource that the agent offers.
"""

from collections.abc import Callable

from deviceplugin.allocation.allocator import AllocationContext, Allocator
from deviceplugin.allocation.allocator_without_cdi import AllocatorWithoutCdi
from deviceplugin.delivery.exchange import RecordExchange


def make_allocator(resource: str, context: AllocationContext, resend: Callable[[], None]) -> Allocator:
    """Return the allocator of a resource, for a container runtime with or without CDI."""
    kind = AllocatorWithoutCdi if isinstance(context.delivery, RecordExchange) else Allocator
    return kind(resource, context, resend)
