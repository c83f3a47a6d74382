"""Settings: the file, a Volcano configuration, the environment and flags; every error names path and remedy."""

from typing import Any

import pytest

from mgpu.model.errors import BadObject
from mgpu.settings import CARD_POLICIES, Settings, load_settings

VOLCANO = """
actions: "reclaim, allocate, backfill, preempt"
tiers:
- plugins:
  - name: priority
- plugins:
  - name: drf
  - name: predicates
    arguments:
      predicate.MGPUEnable: true
      predicate.MGPUPolicy: Spread
      predicate.MGPUWeightOfCore: 30
      predicate.MGPUScheduleMode: id
      predicate.MGPUMaxContainersPerCard: 4
      predicate.GPUSharingEnable: false
"""


def problems(text: str = "", **more: Any) -> list[str]:
    with pytest.raises(BadObject) as error:
        load_settings(text, "mgpu.yaml", **more)
    return [str(problem) for problem in error.value.problems]


def test_nothing_set_is_the_defaults() -> None:
    assert load_settings("") == Settings() == load_settings("{}")  # type: ignore[call-arg]
    own = load_settings("").dialects.mgpu
    assert (own.weight_of_core, own.schedule_mode, own.max_containers_per_card, own.min_gpu_memory) == (
        20,
        "index",
        16,
        256,
    )


def test_the_projects_own_spelling() -> None:
    settings = load_settings(
        "cardPolicy: spread\nnodePolicy: spread\n"
        "dialects: {mgpu: {MGPUPolicy: BinPack, MGPUWeightOfCore: 50, minGPUMemory: 512, enabled: false}}\n"
        "webhook: {port: 9443}\n"
    )
    assert (settings.card_policy, settings.node_policy, settings.webhook.port) == ("spread", "spread", 9443)
    own = settings.dialects.mgpu
    assert (own.policy, own.weight_of_core, own.min_gpu_memory, own.enabled) == ("binpack", 50, 512, False)


@pytest.mark.parametrize("policy", CARD_POLICIES)
def test_every_policy_may_be_set_everywhere(policy: str) -> None:
    text = f"cardPolicy: {policy.title()}\nnodePolicy: {policy}\ndialects: {{mgpu: {{MGPUPolicy: {policy}}}}}"
    settings = load_settings(text, flags={"cardPolicy": policy})
    assert {settings.card_policy, settings.node_policy, settings.card_policy_flag, settings.dialects.mgpu.policy} == {
        policy
    }


def test_a_volcano_configuration() -> None:
    own = load_settings(VOLCANO).dialects.mgpu
    assert (own.mgpu_enable, own.policy, own.weight_of_core) == (True, "spread", 30)
    assert (own.schedule_mode, own.max_containers_per_card) == ("id", 4)


def test_a_volcano_configuration_without_arguments_is_the_defaults() -> None:
    assert load_settings("tiers:\n- plugins:\n  - name: gang\n") == load_settings("")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1]", "mgpu.yaml: must be an object"),
        ("a: [", "mgpu.yaml: is not YAML"),
        ("a: 2024-99-99", "mgpu.yaml: is not YAML"),
        ("colour: red", "mgpu.yaml: colour: unknown; allowed: cardPolicy, nodePolicy, dialects, webhook"),
        ("cardPolicy: best", "mgpu.yaml: cardPolicy: Input should be " + ", ".join(map(repr, CARD_POLICIES[:-1]))),
        ("card_policy: spread", "mgpu.yaml: card_policy: unknown; allowed: cardPolicy"),
        ("cardPolicyFlag: spread", "mgpu.yaml: cardPolicyFlag: unknown; allowed: cardPolicy"),
        ("webhook: {ports: 1}", "mgpu.yaml: webhook.ports: unknown; allowed: host, port"),
        ("webhook: {port: 70000}", "mgpu.yaml: webhook.port: Input should be less than or equal to 65535"),
        ("webhook: 5", "mgpu.yaml: webhook: "),
        ("dialects: {mgpu: {MGPUPolicie: spread}}", "mgpu.yaml: dialects.mgpu.MGPUPolicie: unknown; allowed: enabled"),
        ("dialects: {mgpu: {mgpu_enable: true}}", "mgpu.yaml: dialects.mgpu.mgpu_enable: unknown"),
        ("dialects: {mgpu: {MGPUWeightOfCore: 101}}", "mgpu.yaml: dialects.mgpu.MGPUWeightOfCore: "),
        ("dialects: {mgpu: {MGPUScheduleMode: name}}", "mgpu.yaml: dialects.mgpu.MGPUScheduleMode: Input should be"),
        ("dialects: {other: {}}", "mgpu.yaml: dialects.other: unknown; allowed: mgpu"),
        ("tiers: 5", "mgpu.yaml: tiers: is not a Volcano scheduler configuration"),
        ("tiers: [{plugins: [5]}]", "mgpu.yaml: tiers: is not"),
        ("scheduler: {reservationSeconds: .inf}", "mgpu.yaml: scheduler.reservationSeconds: Input should be a finite"),
        ("cardPolicy: spread\ntiers: []", "mgpu.yaml: cardPolicy: cannot be combined with tiers"),
        ("dialects: {}\nwebhook: {}\ndialects: {}", "mgpu.yaml: is not YAML: 'dialects' is a duplicate key"),
        ("webhook:\n  port: 1\n  port: 2", "mgpu.yaml: is not YAML: 'port' is a duplicate key"),
        (
            "tiers: [{plugins: [{name: predicates, arguments: {predicate.MGPUPolicie: spread}}]}]",
            "mgpu.yaml: tiers[0].plugins[0].arguments.predicate.MGPUPolicie: unknown; allowed: MGPUEnable, MGPUPolicy",
        ),
    ],
)  # fmt: skip
def test_an_error_names_the_path_and_what_is_allowed(text: str, problem: str) -> None:
    (found,) = problems(text)
    assert found.startswith(problem)


def test_a_bad_volcano_value_is_named() -> None:
    (found,) = problems("tiers: [{plugins: [{arguments: {predicate.MGPUWeightOfCore: 200}}]}]")
    assert "MGPUWeightOfCore: Input should be less than or equal to 100, not 200" in found


def test_every_problem_is_named_at_once() -> None:
    found = problems("a: 1\nnodePolicy: x\n", environ={"MGPU_WEBHOOK__NOPE": "1"})
    assert len(found) == 3


def test_the_environment_is_over_the_file_and_flags_over_both() -> None:
    text = "nodePolicy: binpack\nwebhook: {port: 1000}\ndialects: {mgpu: {MGPUPolicy: binpack}}"
    environ = {
        "MGPU_NODE_POLICY": "spread",
        "MGPU_WEBHOOK__PORT": "2000",
        "MGPU_SCHEDULER__EXTENDERPORT": "2001",
        "MGPU_DIALECTS__MGPU__MGPUPOLICY": "spread",
        "MGPU_WEBHOOK_PORT": "tcp://10.0.0.1:443",
        "PATH": "/bin",
    }
    settings = load_settings(text, environ=environ, flags={"webhook.port": 3000, "nodePolicy": None})
    assert settings.node_policy == "spread"
    assert settings.webhook.port == 3000
    assert settings.scheduler.extender_port == 2001
    assert settings.dialects.mgpu.policy == "spread"


@pytest.mark.parametrize("name", ["MGPU_NO__SUCH", "MGPU_WEBHOOK__PORT__DEEPER", "MGPU_WEBHOOK__"])
def test_an_environment_variable_that_names_no_setting_is_an_error(name: str) -> None:
    assert problems(environ={name: "1"}) == [f"{name}: is not the name of a setting"]


def test_which_card_policy_holds() -> None:
    """The flag, else the dialect's setting, else cardPolicy, else the dialect's default.

    Source: docs/design/design.md, "Commands".
    """
    both = "cardPolicy: spread\ndialects: {mgpu: {MGPUPolicy: binpack}}"

    def chosen(text: str, **flags: str) -> str:
        settings = load_settings(text, flags=flags)
        return settings.card_policy_for(settings.dialects.mgpu.policy, "default")

    assert chosen(both, cardPolicy="spread") == "spread"
    assert chosen(both) == "binpack"
    assert chosen("cardPolicy: spread") == "spread"
    assert chosen("") == "default"


@pytest.mark.parametrize(
    ("text", "flags", "unit"),
    [
        ("", {}, "GiB"),
        ("dialects: {gpushare: {memoryUnit: mib}}", {}, "MiB"),
        ("dialects: {gpushare: {memoryUnit: MiB}}", {"dialects.gpushare.memoryUnit": "GIB"}, "GiB"),
    ],
)
def test_the_unit_of_gpu_mem(text: str, flags: dict[str, Any], unit: str) -> None:
    assert load_settings(text, flags=flags).dialects.gpushare.memory_unit == unit


def test_other_units_of_gpu_mem_are_refused() -> None:
    (problem,) = problems("dialects: {gpushare: {memoryUnit: Gi}}")
    assert problem == "mgpu.yaml: dialects.gpushare.memoryUnit: Input should be 'GiB' or 'MiB', not 'Gi'"


def test_koordinator_has_a_policy_of_its_own() -> None:
    own = load_settings("{cardPolicy: spread, dialects: {koordinator: {policy: Binpack}}}").dialects.koordinator
    assert (own.enabled, own.policy) == (True, "binpack")
    (problem,) = problems("dialects: {koordinator: {schedulerName: x}}")
    allowed = "enabled, policy, minGPUMemory, minGPUMemoryRatio"
    assert problem == f"mgpu.yaml: dialects.koordinator.schedulerName: unknown; allowed: {allowed}"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("koordinator: {minGPUMemory: -1}", "koordinator.minGPUMemory: Input should be greater than or equal to 0"),
        ("koordinator: {minGPUMemory: 8Gi}", "koordinator.minGPUMemory: Input should be a valid integer"),
        ("koordinator: {minGPUMemoryRatio: 0}", "koordinator.minGPUMemoryRatio: Input should be greater than or"),
        ("koordinator: {minGPUMemoryRatio: 101}", "koordinator.minGPUMemoryRatio: Input should be less than or equal"),
        ("gpushare: {minGPUMemory: 1.5}", "gpushare.minGPUMemory: Input should be a valid integer"),
    ],
)
def test_a_least_amount_that_is_none_is_refused(text: str, rule: str) -> None:
    (problem,) = problems(f"dialects: {{{text}}}")
    assert problem.startswith(f"mgpu.yaml: dialects.{rule}")


SEED = """
tiers:
- plugins:
  - name: dynamicgpuslice
    arguments:
      dynamicgpuslice.schedulePolicy: Spread
      dynamicgpuslice.scheduleWeight: 5
      dynamicgpuslice.weight.cpu: 1
      dynamicgpuslice.weight.memory: 2
      dynamicgpuslice.weight.gpu: 5
      dynamicgpuslice.weight.resources: example.com/a, example.com/b
      dynamicgpuslice.weight.resources.example.com/b: 3
      dynamicgpuslice.DevicePluginCMName: other
      dynamicgpuslice.DevicePluginCMNamespace: default
      dynamicgpuslice.KnowGeometries:
        - models: ["NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"]
          allowedGeometries:
            - 1g.10gb: 7
            - {2g.20gb: 2, 3g.40gb: 1}
            - 7g.79gb: 1
"""


def of_slices(*lines: str) -> str:
    return "\n".join(["dialects:", "  slices:", *(f"    {line}" for line in lines)])


def test_the_slices_of_the_seeds_volcano_configuration() -> None:
    own = load_settings(SEED).dialects.slices
    assert (own.schedule_policy, own.schedule_weight) == ("spread", 5)
    assert own.weights == {"cpu": 1, "memory": 2, "gpu": 5, "example.com/a": 1, "example.com/b": 3}
    assert (own.config_map, own.config_map_namespace) == ("other", "default")
    assert own.geometries == dict.fromkeys(
        ["NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"],
        ({"1g.10gb": 7}, {"2g.20gb": 2, "3g.40gb": 1}, {"7g.80gb": 1}),
    )


def test_the_same_in_a_file_of_our_own_flat_and_below_weight() -> None:
    flat = of_slices("weight.cpu: 0", "weight.gpu: 5", "weight.resources: a/b", "weight.resources.a/b: 2")
    nested = of_slices("weight: {cpu: 0, gpu: 5, resources: {a/b: 2}}")
    for text in (flat, nested):
        assert load_settings(text).dialects.slices.weights == {"memory": 1, "gpu": 5, "a/b": 2}
    over = load_settings(flat, environ={"MGPU_DIALECTS__SLICES__WEIGHT__CPU": "7"}).dialects.slices
    assert over.weights["cpu"] == 7


def test_slices_and_the_nodes_part_by_default() -> None:
    settings = load_settings("")
    own, node = settings.dialects.slices, settings.deviceplugin
    assert (own.enabled, own.schedule_policy, own.schedule_weight, own.geometries) == (True, "binpack", 10, {})
    assert own.weights == {"cpu": 1, "memory": 1, "gpu": 1}
    assert (own.config_map, own.config_map_namespace) == ("mps-configmap", "mgpu-system")
    assert (node.isolation, node.mps_dir, node.mps_control, node.mig_manager) == (
        "none",
        "/run/mgpu/mps",
        "nvidia-cuda-mps-control",
        True,
    )
    assert node.limits_dir == "/run/mgpu/limits"


def geometries(models: str, allowed: str) -> str:
    return of_slices(f"KnowGeometries: [{{models: {models}, allowedGeometries: {allowed}}}]")


A_LIST = "mgpu.yaml: dialects.slices.KnowGeometries.0.allowedGeometries"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (of_slices("schedulePolicy: best"), "mgpu.yaml: dialects.slices.schedulePolicy: Input should be 'binpack' or"),
        (of_slices("weights: {}"), "mgpu.yaml: dialects.slices.weights: unknown; allowed: enabled, schedulePolicy"),
        (of_slices("weight.gpus: 1"), "mgpu.yaml: dialects.slices.weight.gpus: unknown; allowed: cpu, memory, gpu"),
        (of_slices("weight.gpu: -1"), "mgpu.yaml: dialects.slices.weight.gpu: Input should be greater than or"),
        (of_slices("weight.resources.a/b: 1"), "mgpu.yaml: dialects.slices.weight.resources.a/b: 'a/b' is not listed"),
        (of_slices("weight.resources: [[1]]"), "mgpu.yaml: dialects.slices.weight.resources: Input should be a valid"),
        (of_slices("weight.resources: 7"), "mgpu.yaml: dialects.slices.weight.resources: Input should be a valid"),
        (
            of_slices("weight.resources: a/b", "weight.resources.a/b: x"),
            "mgpu.yaml: dialects.slices.weight.resources.a/b: Input should be a valid integer",
        ),
        (of_slices("weight.resources: cpu"), "mgpu.yaml: dialects.slices.weight: resources names cpu"),
        (of_slices("weight: {cpu: 0, memory: 0, gpu: 0}"), "mgpu.yaml: dialects.slices.weight: at least one weight"),
        (of_slices("weight: {cpu: 0}", "weight.gpu: 1"), "mgpu.yaml: dialects.slices.weight: cannot be combined with"),
        (geometries("[A100]", "[{1g.10gb: 1.5}]"), f"{A_LIST}.0.1g.10gb: Input should be a valid integer"),
        (geometries("[A100]", "[{1g.10gb: 7}, {1g.10gb: 0}]"), f"{A_LIST}.1.1g.10gb: Input should be greater"),
        (geometries("[A100]", "[{10gb: 1}]"), f"{A_LIST}.0.10gb.[key]: is not a MIG profile such as 2g.20gb"),
        (geometries("[A100]", "[{}]"), f"{A_LIST}.0: Dictionary should have at least 1 item"),
        (geometries("[A100]", "[]"), f"{A_LIST}: Tuple should have at least 1 item"),
        (geometries("[]", "[{1g.10gb: 7}]"), "mgpu.yaml: dialects.slices.KnowGeometries.0.models: Value should have"),
        (geometries("[A100]", "[{7g.80gb: 1, 7g.79gb: 1}]"), f"{A_LIST}.0: names a profile twice"),
        (geometries("[A100-80GB]", "[{1g.10gb: 8}]"), f"{A_LIST}.0: A100-80 cannot be partitioned into 8 of 1g.10gb"),
        (geometries("[A100-SXM4-40GB]", "[{1g.5gb: 7}, {1g.10gb: 5}]"), f"{A_LIST}.1: A100-40 cannot be partitioned"),
        (geometries("[NVIDIA-A30]", "[{2g.20gb: 1}]"), f"{A_LIST}.0: A30-24 has no profile 2g.20gb; it has 1g.6gb"),
        (geometries("[A100, H100-80GB]", "[{1g.5gb: 7}]"), f"{A_LIST}.0: H100-80 has no profile 1g.5gb"),
        (of_slices("KnowGeometries: [{model: A100}]"), "mgpu.yaml: dialects.slices.KnowGeometries.0.models: Field"),
        ("deviceplugin: {isolation: mig}", "mgpu.yaml: deviceplugin.isolation: Input should be 'none', 'mps'"),
        (SEED.replace("schedulePolicy", "policy"), "mgpu.yaml: tiers[0].plugins[0].arguments.dynamicgpuslice.policy: "),
        (SEED.replace("cpu: 1", "cpu: much"), "mgpu.yaml: dialects.slices.weight.cpu: Input should be a valid integer"),
    ],
)  # fmt: skip
def test_a_bad_setting_of_slices_names_its_path(text: str, problem: str) -> None:
    assert any(found.startswith(problem) for found in problems(text)), problems(text)


def test_geometries_of_a_model_that_is_not_known_are_the_users_own() -> None:
    two = "[{models: Z900, allowedGeometries: [{9g.99gb: 3}]}, {models: 'Z8,Z900', allowedGeometries: [{1g.1gb: 1}]}]"
    own = load_settings(of_slices(f"KnowGeometries: {two}")).dialects.slices
    assert own.geometries == {"Z900": ({"9g.99gb": 3}, {"1g.1gb": 1}), "Z8": ({"1g.1gb": 1},)}


def test_an_unknown_key_within_a_list_is_named() -> None:
    found = problems(of_slices("KnowGeometries: [{models: [A100], allowedGeometries: [{1g.10gb: 1}], more: 1}]"))
    assert found == [
        "mgpu.yaml: dialects.slices.KnowGeometries.0.more: unknown; allowed: models, allowedGeometries",
    ]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-1"])
def test_the_extender_is_open_to_nobody_without_a_certificate(host: str) -> None:
    with pytest.raises(BadObject, match=r"scheduler\.extenderHost: must be a loopback address.* not '" + host):
        load_settings(flags={"scheduler": {"extenderHost": host}})
    flags = {"scheduler": {"extenderHost": host, "extenderClientCa": "ca.crt"}}
    assert load_settings(flags=flags).scheduler.extender_host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_on_loopback_the_extender_needs_none(host: str) -> None:
    assert load_settings(flags={"scheduler": {"extenderHost": host}}).scheduler.extender_client_ca == ""
