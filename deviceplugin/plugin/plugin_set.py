"""The plugins of all resources that the agent offers, each with its allocator.

`deviceplugin.agent` creates the set. `advertised_resources` adds the plugins of the dialects' resources, and
`partitioning.slice_plugins` adds the plugins of slices through the function `make_plugin`, which is `PluginSet.add`.
`deviceplugin.reconciler` calls `resume`, and `pods.remnants` calls `keep_only`.
"""

from collections.abc import Collection

from deviceplugin.allocation import make_allocator
from deviceplugin.allocation.allocator import AllocationContext, Allocator
from deviceplugin.plugin.plugin_server import DeviceList, Plugin


class PluginSet:
    """The plugins of the agent and their allocators. Use it on one event loop.

    Args:
        context: The parts of the agent that the allocators share.

    Attributes:
        plugins: The plugins by resource. A plugin is never removed, because the kubelet lists a resource for minutes
            after its plugin has ended.
    """

    def __init__(self, context: AllocationContext) -> None:
        self._context = context
        self._resumed = False
        self._allocators: dict[str, Allocator] = {}
        self.plugins: dict[str, Plugin] = {}

    def add(self, resource: str) -> Plugin:
        """Create and return the plugin of a resource that has none yet."""
        device_list = DeviceList()
        allocator = make_allocator(resource, self._context, device_list.resend)
        if self._resumed:
            allocator.resume()
        self._allocators[resource] = allocator
        self.plugins[resource] = Plugin(resource, allocator, device_list)
        return self.plugins[resource]

    def resume(self) -> None:
        """Allow containers to start. Call this once the pods and cards of the node have been read."""
        self._resumed = True
        for allocator in self._allocators.values():
            allocator.resume()

    def keep_only(self, uids: Collection[str]) -> None:
        """Remove the allocators' data of all pods except those with these UIDs."""
        for allocator in self._allocators.values():
            allocator.keep_only(uids)
