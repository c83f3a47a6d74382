"""The wire format is the kubelet's and the container runtime's: one wrong number, and it silently reads nothing."""

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from proto import cri_pb2, deviceplugin_pb2, dra_health_pb2, dra_pb2, pluginregistration_pb2, podresources_pb2
from proto.generate import stale

DEVICE_PLUGIN = {
    "DevicePluginOptions": "1 pre_start_required, 2 get_preferred_allocation_available",
    "RegisterRequest": "1 version, 2 endpoint, 3 resource_name, 4 options",
    "Empty": "",
    "ListAndWatchResponse": "1 devices*",
    "TopologyInfo": "1 nodes*",
    "NUMANode": "1 ID",
    "Device": "1 ID, 2 health, 3 topology",
    "PreStartContainerRequest": "1 devices_ids*",
    "PreStartContainerResponse": "",
    "PreferredAllocationRequest": "1 container_requests*",
    "ContainerPreferredAllocationRequest": "1 available_deviceIDs*, 2 must_include_deviceIDs*, 3 allocation_size",
    "PreferredAllocationResponse": "1 container_responses*",
    "ContainerPreferredAllocationResponse": "1 deviceIDs*",
    "AllocateRequest": "1 container_requests*",
    "ContainerAllocateRequest": "1 devices_ids*",
    "CDIDevice": "1 name",
    "AllocateResponse": "1 container_responses*",
    "ContainerAllocateResponse": "1 envs*, 2 mounts*, 3 devices*, 4 annotations*, 5 cdi_devices*",
    "Mount": "1 container_path, 2 host_path, 3 read_only",
    "DeviceSpec": "1 container_path, 2 host_path, 3 permissions",
}
POD_RESOURCES = {
    "AllocatableResourcesRequest": "",
    "AllocatableResourcesResponse": "1 devices*, 2 cpu_ids*, 3 memory*",
    "ListPodResourcesRequest": "",
    "ListPodResourcesResponse": "1 pod_resources*",
    "PodResources": "1 name, 2 namespace, 3 containers*",
    "ContainerResources": "1 name, 2 devices*, 3 cpu_ids*, 4 memory*, 5 dynamic_resources*",
    "ContainerMemory": "1 memory_type, 2 size, 3 topology",
    "ContainerDevices": "1 resource_name, 2 device_ids*, 3 topology",
    "TopologyInfo": "1 nodes*",
    "NUMANode": "1 ID",
    "DynamicResource": "2 claim_name, 3 claim_namespace, 4 claim_resources*",
    "ClaimResource": "1 cdi_devices*, 2 driver_name, 3 pool_name, 4 device_name, 5 share_id",
    "CDIDevice": "1 name",
    "GetPodResourcesRequest": "1 pod_name, 2 pod_namespace",
    "GetPodResourcesResponse": "1 pod_resources",
}
DRA = {
    "NodePrepareResourcesRequest": "1 claims*",
    "NodePrepareResourcesResponse": "1 claims*",
    "NodePrepareResourceResponse": "1 devices*, 2 error",
    "Device": "1 request_names*, 2 pool_name, 3 device_name, 4 cdi_device_ids*, 5 share_id",
    "NodeUnprepareResourcesRequest": "1 claims*",
    "NodeUnprepareResourcesResponse": "1 claims*",
    "NodeUnprepareResourceResponse": "1 error",
    "Claim": "1 namespace, 2 uid, 3 name",
}
DRA_HEALTH = {
    "NodeWatchResourcesRequest": "",
    "NodeWatchResourcesResponse": "1 devices*",
    "DeviceHealth": "1 device, 2 health, 3 last_updated_time, 4 health_check_timeout_seconds, 5 message",
    "DeviceIdentifier": "1 pool_name, 2 device_name",
}
PLUGIN_REGISTRATION = {
    "InfoRequest": "",
    "PluginInfo": "1 type, 2 name, 3 endpoint, 4 supported_versions*",
    "RegistrationStatus": "1 plugin_registered, 2 error",
    "RegistrationStatusResponse": "",
}
CRI = {
    "VersionRequest": "1 version",
    "VersionResponse": "2 runtime_name, 3 runtime_version",
    "StatusRequest": "1 verbose",
    "StatusResponse": "2 info*",
    "ContainerFilter": "4 label_selector*",
    "ListContainersRequest": "1 filter",
    "Container": "1 id, 6 state, 8 labels*",
    "PodSandboxFilter": "3 label_selector*",
    "ListPodSandboxRequest": "1 filter",
    "PodSandbox": "1 id, 3 state, 5 labels*",
    "ListPodSandboxResponse": "1 items*",
    "ListContainersResponse": "1 containers*",
    "StopContainerRequest": "1 container_id, 2 timeout",
    "StopContainerResponse": "",
    "GetEventsRequest": "",
    "ContainerEventResponse": "1 container_id, 2 container_event_type",
    "ContainerStatusRequest": "1 container_id, 2 verbose",
    "ContainerStatusResponse": "2 info*",
}
STATES = {"CONTAINER_CREATED": 0, "CONTAINER_RUNNING": 1, "CONTAINER_EXITED": 2, "CONTAINER_UNKNOWN": 3}
INTEGERS = {
    "Container.state": FieldDescriptor.TYPE_ENUM,
    "PodSandbox.state": FieldDescriptor.TYPE_ENUM,
    "NUMANode.ID": FieldDescriptor.TYPE_INT64,
    "ContainerPreferredAllocationRequest.allocation_size": FieldDescriptor.TYPE_INT32,
    "ContainerMemory.size": FieldDescriptor.TYPE_UINT64,
    "StopContainerRequest.timeout": FieldDescriptor.TYPE_INT64,
    "ContainerEventResponse.container_event_type": FieldDescriptor.TYPE_ENUM,
    "ContainerResources.cpu_ids": FieldDescriptor.TYPE_INT64,
    "AllocatableResourcesResponse.cpu_ids": FieldDescriptor.TYPE_INT64,
    "DeviceHealth.health": FieldDescriptor.TYPE_ENUM,
    "DeviceHealth.last_updated_time": FieldDescriptor.TYPE_INT64,
    "DeviceHealth.health_check_timeout_seconds": FieldDescriptor.TYPE_INT64,
}
CALLS = {
    "v1beta1.Registration": {"Register": ("RegisterRequest", "Empty")},
    "v1beta1.DevicePlugin": {
        "GetDevicePluginOptions": ("Empty", "DevicePluginOptions"),
        "ListAndWatch": ("Empty", "ListAndWatchResponse"),
        "GetPreferredAllocation": ("PreferredAllocationRequest", "PreferredAllocationResponse"),
        "Allocate": ("AllocateRequest", "AllocateResponse"),
        "PreStartContainer": ("PreStartContainerRequest", "PreStartContainerResponse"),
    },
    "v1.PodResourcesLister": {
        "List": ("ListPodResourcesRequest", "ListPodResourcesResponse"),
        "GetAllocatableResources": ("AllocatableResourcesRequest", "AllocatableResourcesResponse"),
        "Get": ("GetPodResourcesRequest", "GetPodResourcesResponse"),
    },
    "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin": {
        "NodePrepareResources": ("NodePrepareResourcesRequest", "NodePrepareResourcesResponse"),
        "NodeUnprepareResources": ("NodeUnprepareResourcesRequest", "NodeUnprepareResourcesResponse"),
    },
    "v1alpha1.DRAResourceHealth": {
        "NodeWatchResources": ("NodeWatchResourcesRequest", "NodeWatchResourcesResponse"),
    },
    "pluginregistration.Registration": {
        "GetInfo": ("InfoRequest", "PluginInfo"),
        "NotifyRegistrationStatus": ("RegistrationStatus", "RegistrationStatusResponse"),
    },
    "runtime.v1.RuntimeService": {
        "Version": ("VersionRequest", "VersionResponse"),
        "Status": ("StatusRequest", "StatusResponse"),
        "ListPodSandbox": ("ListPodSandboxRequest", "ListPodSandboxResponse"),
        "ListContainers": ("ListContainersRequest", "ListContainersResponse"),
        "StopContainer": ("StopContainerRequest", "StopContainerResponse"),
        "GetContainerEvents": ("GetEventsRequest", "ContainerEventResponse"),
        "ContainerStatus": ("ContainerStatusRequest", "ContainerStatusResponse"),
    },
}
INTERFACES = {
    deviceplugin_pb2: DEVICE_PLUGIN,
    podresources_pb2: POD_RESOURCES,
    dra_pb2: DRA,
    dra_health_pb2: DRA_HEALTH,
    pluginregistration_pb2: PLUGIN_REGISTRATION,
    cri_pb2: CRI,
}
MODULES = pytest.mark.parametrize(
    ("module", "messages"),
    INTERFACES.items(),
    ids=[module.__name__.removeprefix("proto.").removesuffix("_pb2") for module in INTERFACES],
)


def written(message: Descriptor) -> str:
    fields = sorted(message.fields, key=lambda field: field.number)
    return ", ".join(f"{field.number} {field.name}{'*' if field.is_repeated else ''}" for field in fields)


@MODULES
def test_messages_have_the_fields_of_the_interface(module: object, messages: dict[str, str]) -> None:
    found = module.DESCRIPTOR.message_types_by_name  # type: ignore[attr-defined]
    assert {name: written(message) for name, message in found.items()} == messages


@MODULES
def test_numbers_have_the_width_of_the_interface(module: object, messages: dict[str, str]) -> None:  # noqa: ARG001
    for message in module.DESCRIPTOR.message_types_by_name.values():  # type: ignore[attr-defined]
        for field in message.fields:
            if field.cpp_type not in (field.CPPTYPE_STRING, field.CPPTYPE_MESSAGE, field.CPPTYPE_BOOL):
                assert field.type == INTEGERS[f"{message.name}.{field.name}"]


def test_services_have_the_calls_of_the_interface() -> None:
    services = [service for module in INTERFACES for service in module.DESCRIPTOR.services_by_name.values()]
    found = {s.full_name: {m.name: (m.input_type.name, m.output_type.name) for m in s.methods} for s in services}
    assert found == CALLS
    streams = [m.name for s in services for m in s.methods if m.server_streaming]
    assert streams == ["ListAndWatch", "NodeWatchResources", "GetContainerEvents"]


def test_states_have_the_numbers_of_the_interface() -> None:
    assert dict(cri_pb2.ContainerState.items()) == STATES
    assert dict(cri_pb2.PodSandboxState.items()) == {"SANDBOX_READY": 0, "SANDBOX_NOTREADY": 1}
    assert dict(dra_health_pb2.HealthStatus.items()) == {"UNKNOWN": 0, "HEALTHY": 1, "UNHEALTHY": 2}


def test_the_committed_modules_are_what_the_sources_give() -> None:
    assert stale() == []
