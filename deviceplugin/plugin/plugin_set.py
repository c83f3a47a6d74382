"""The plugins of all resources that the agent serves, those of slices included, each with its allocator."""

from collections.abc import Collection

from deviceplugin.allocation import make_allocator
from deviceplugin.allocation.allocator import AllocationContext, Allocator
from deviceplugin.plugin.plugin_server import DeviceList, Plugin


class PluginSet:
    """The plugins of the agent and their allocators. Used on one event loop.

    Attributes:
        plugins: by resource. A plugin is never removed: the kubelet keeps a registered resource for minutes.
    """

    def __init__(self, context: AllocationContext) -> None:
        self._context = context
        self._resumed = False
        self._allocators: dict[str, Allocator] = {}
        self.plugins: dict[str, Plugin] = {}

    def add(self, resource: str) -> Plugin:
        """Make the plugin of a resource that is not served yet."""
        device_list = DeviceList()
        allocator = make_allocator(resource, self._context, device_list.resend)
        if self._resumed:
            allocator.resume()
        self._allocators[resource] = allocator
        self.plugins[resource] = Plugin(resource, allocator, device_list)
        return self.plugins[resource]

    def resume(self) -> None:
        """Let containers start: all pods of the node and its cards are known now."""
        self._resumed = True
        for allocator in self._allocators.values():
            allocator.resume()

    def keep_only(self, uids: Collection[str]) -> None:
        """Forget what was answered for all other pods."""
        for allocator in self._allocators.values():
            allocator.keep_only(uids)
