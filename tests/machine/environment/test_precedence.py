"""Who wins when several layers set a variable, and what belongs on which machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs

from primus.errors import PrimusError, UsageError
from primus.machine import profile
from primus.machine.assumed_machine import build_assumed_machine
from primus.machine.cluster import ClusterLayout
from primus.machine.environment.precedence import (
    NEVER_SET,
    Environment,
    GivenVariables,
    JobNode,
    build_environment,
    find_rocm_library,
)
from primus.machine.environment.variable_choice import AMD_ONLY, VariableChoice
from primus.machine.facts import MachineFacts, Software
from primus.machine.network.selection import Network, choose_network
from primus.machine.workload import JobWorkload


class Typed(Struct, frozen=True):
    """A value that somebody set."""

    value: str
    source: str = "exp.yaml:3"


NO_NETWORK = Network()
RAILS = Network(interface="eth0", hcas=("mlx5_0:1", "mlx5_10:1"), gid_index=3, nic_kind="mellanox")
ONE = ClusterLayout(nproc=8)
TWO = ClusterLayout(nproc=8, nnodes=2, master_addr="a")
MEGATRON = JobWorkload(framework="megatron")


def decided(
    model: str | MachineFacts = "mi300x",
    network: Network = NO_NETWORK,
    layout: ClusterLayout = ONE,
    environ: dict[str, str] | None = None,
    typed: dict[str, Typed] | None = None,
    hooks: dict[str, Typed] | None = None,
    patches: dict[str, Typed] | None = None,
    rocm_library: str | None = None,
    workload: JobWorkload | None = MEGATRON,
    torch: str | None = None,
) -> Environment:
    facts = build_assumed_machine(model) if isinstance(model, str) else model
    node = JobNode(
        facts=facts, network=network, layout=layout, workload=workload, torch=torch, rocm_library=rocm_library
    )
    values = GivenVariables(shell=environ or {}, given=typed or {}, hooks=hooks or {}, patches=patches or {})
    return build_environment(node, values)


def choice(name: str, result: Environment) -> VariableChoice:
    return result.variables[name]


MODELS = [profile.format_typed_name(model) for model in profile.load_all_profiles()]
NVIDIA = [profile.format_typed_name(model) for model in profile.load_all_profiles() if model.vendor == "nvidia"]


def test_a_machine_without_gpus_gets_nothing() -> None:
    assert decided("cpu") == Environment(variables={})
    assert decided("cpu", environ={"PRIMUS_DETERMINISTIC": "1"}).variables.keys() == {"PRIMUS_DETERMINISTIC"}


def test_a_machine_without_gpus_is_told_its_interface_only() -> None:
    assert {name: item.value for name, item in decided("cpu", RAILS, TWO).variables.items()} == {
        "GLOO_SOCKET_IFNAME": "eth0"
    }


@pytest.mark.parametrize("model", MODELS)
def test_no_layer_chooses_devices_preloads_or_xla_flags(model: str) -> None:
    assert not NEVER_SET & decided(model, RAILS, TWO).variables.keys()


@pytest.mark.parametrize("model", NVIDIA)
@pytest.mark.parametrize("nic", ["mellanox", "broadcom", "ainic", "slingshot"])
def test_nvidia_gets_no_variable_of_amd(model: str, nic: str) -> None:
    network = structs.replace(RAILS, nic_kind=nic)
    for flags in ({}, {"PRIMUS_DETERMINISTIC": "1"}):
        names = decided(model, network, TWO, flags, rocm_library="/opt/rocm/lib").variables
        assert not [name for name in names if name.startswith((*AMD_ONLY, "ROC", "GPU_MAX"))]
        assert "LD_LIBRARY_PATH" not in names


@pytest.mark.parametrize("model", ["mi350x", "mi355x"])
def test_warp_speed_is_off_on_cdna_4_else_the_loss_becomes_nan(model: str) -> None:
    item = choice("RCCL_WARP_SPEED_AUTO", decided(model))
    assert (item.value, item.layer, item.source) == ("0", "gfx950", "AMD-AGI/Primus#1178")


def test_warp_speed_is_left_alone_elsewhere() -> None:
    assert "RCCL_WARP_SPEED_AUTO" not in decided("mi300x").variables


def test_a_higher_layer_beats_a_lower_and_says_so() -> None:
    item = choice("NVTE_CK_USES_BWD_V3", decided("mi300a"))
    assert (item.value, item.layer) == ("0", "mi300a")
    assert [(lost.layer, lost.value) for lost in item.overrode] == [("amd", "1")]


def test_a_layer_can_leave_unset_what_a_lower_one_sets() -> None:
    item = choice("NVTE_ROCM_ENABLE_MXFP8", decided("mi210"))
    assert (item.value, item.layer) == (None, "gfx90a")


def test_the_gid_of_ainic_wins_over_the_usual_one() -> None:
    network = Network(hcas=("ionic_0:1",), nic_kind="ainic")
    item = choice("NCCL_IB_GID_INDEX", decided("mi355x", network, TWO))
    assert (item.value, item.layer) == ("1", "nic:ainic")
    assert [(lost.layer, lost.value) for lost in item.overrode] == [("amd", "3")]


def test_a_gid_that_the_ports_show_wins_over_the_adapters_usual_one() -> None:
    network = Network(hcas=("bnxt_re0:1",), nic_kind="broadcom", gid_index=5)
    item = choice("NCCL_IB_GID_INDEX", decided("mi300x", network, TWO))
    assert (item.value, item.layer) == ("5", "network")


def test_infiniband_gets_no_gid() -> None:
    network = Network(hcas=("mlx5_0:1",), nic_kind="mellanox")
    assert choice("NCCL_IB_GID_INDEX", decided("mi300x", network, TWO)).value is None


def test_one_node_needs_no_network() -> None:
    names = decided("mi300x", RAILS, ONE).variables
    assert not [
        name for name in names if name.startswith(("NCCL_IB", "NCCL_SOCKET", "NCCL_PXN", "GLOO_", "NCCL_CROSS"))
    ]


def test_several_nodes_are_told_interface_and_ports_by_exact_name() -> None:
    result = decided("mi300x", RAILS, TWO)
    assert choice("NCCL_SOCKET_IFNAME", result).value == choice("GLOO_SOCKET_IFNAME", result).value == "eth0"
    assert choice("NCCL_IB_HCA", result).value == "=mlx5_0:1,mlx5_10:1"
    assert choice("NCCL_PXN_DISABLE", result).value == "0"


def test_without_rdma_nothing_is_said_about_it() -> None:
    names = decided("mi300x", Network(interface="eth0"), TWO).variables
    assert "NCCL_P2P_NET_CHUNKSIZE" in names
    assert not [name for name in names if name.startswith(("NCCL_IB", "NCCL_PXN"))]


def test_variables_of_amds_on_nvidias_machine_are_said() -> None:
    environ = {"HSA_XNACK": "1", "NCCL_DEBUG": "WARN", "RCCL_MSCCL_ENABLE": "0"}
    (warning,) = decided("h100", environ=environ).warnings
    assert warning == "HSA_XNACK, RCCL_MSCCL_ENABLE: for AMD devices only, no effect on this machine"
    assert not any("no effect" in said for said in decided("mi300x", environ=environ).warnings)


def test_warnings_of_the_network_are_passed_on() -> None:
    network = Network(warnings=("no port is up",))
    real = structs.replace(build_assumed_machine("mi300x"), assumed=False)
    assert decided(real, network, TWO).warnings == ("no port is up",)


def test_gpus_of_different_models_get_what_they_share() -> None:
    mixed = structs.replace(
        build_assumed_machine("mi300x:1"),
        devices=(*build_assumed_machine("mi300a:1").devices, *build_assumed_machine("mi300x:1").devices),
    )
    result = decided(mixed)
    assert choice("HSA_NO_SCRATCH_RECLAIM", result).value == "1"
    assert "different models (MI300A, MI300X): only common settings are applied" in result.warnings[0]
    both = structs.replace(
        mixed, devices=(*build_assumed_machine("h100:1").devices, *build_assumed_machine("mi300x:1").devices)
    )
    assert {item.layer for item in decided(both, workload=None).variables.values()} == {"gpu"}


def unknown(name: str, architecture: str | None = None) -> MachineFacts:
    device = structs.replace(
        build_assumed_machine("mi300x:1").devices[0], model=None, name=name, architecture=architecture
    )
    return MachineFacts(devices=(device,))


def test_an_unknown_member_of_a_family_gets_its_settings_with_a_warning() -> None:
    result = decided(unknown("AMD Instinct MI250Y", "gfx90a"))
    assert choice("GPU_MAX_HEAP_SIZE", result).value == "90"
    assert result.warnings == ("unknown GPU model AMD Instinct MI250Y: using the settings of MI250X",)


@pytest.mark.parametrize(
    ("name", "architecture", "layer"),
    [("AMD Instinct MI350P", "gfx950", "gfx950"), ("AMD Radeon Graphics", "gfx1250", "gfx1250"), ("new", None, "amd")],
)
def test_an_unknown_model_gets_its_architecture_or_what_its_vendor_has(
    name: str, architecture: str | None, layer: str
) -> None:
    result = decided(unknown(name, architecture))
    assert result.warnings == (f"unknown GPU model {name}: using the settings of '{layer}'",)
    assert choice("HSA_ENABLE_SDMA", result).layer == "amd"


VALUES = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=8)
NAMES = sorted(decided("mi300x").variables)
ORDER = ("hook", "patch", "experiment", "user", "--env")


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(NAMES), values=st.dictionaries(st.sampled_from(ORDER), VALUES, min_size=1))
def test_what_is_nearest_to_the_user_wins(name: str, values: dict[str, str]) -> None:
    def of(layer: str, source: str) -> dict[str, Typed]:
        return {name: Typed(values[layer], source)} if layer in values else {}

    result = decided(
        environ={name: values["user"]} if "user" in values else {},
        typed=of("experiment", "exp.yaml:3") | of("--env", "--env"),
        hooks=of("hook", "hooks/00_net.sh"),
        patches=of("patch", "fix.sh"),
    )
    highest = max(values, key=ORDER.index)
    assert (choice(name, result).value, choice(name, result).layer) == (values[highest], highest)


@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from(["mi300x", "mi210", "h100", "b200", "cpu"]),
    environ=st.dictionaries(st.sampled_from([*NAMES, *sorted(NEVER_SET), "HF_HOME", "NCCL_DEBUG"]), VALUES),
)
def test_what_the_user_set_always_stays(model: str, environ: dict[str, str]) -> None:
    result = decided(model, RAILS, TWO, environ)
    for name, value in environ.items():
        if name in result.variables:
            assert (choice(name, result).value, choice(name, result).layer) == (value, "user")


def test_the_shell_wins_over_the_experiment_for_every_decision() -> None:
    exp = {"PRIMUS_DETERMINISTIC": Typed("1"), "DATA_PATH": Typed("/experiment")}
    result = decided(typed=exp, environ={"PRIMUS_DETERMINISTIC": "0", "DATA_PATH": "/shell"})
    assert "NCCL_ALGO" not in result.variables
    assert choice("HF_HOME", result).value == "/shell/huggingface"
    assert choice("PRIMUS_DETERMINISTIC", result).overrode[0].layer == "experiment"


def test_an_empty_value_of_the_user_stays_empty() -> None:
    item = choice("NCCL_IB_HCA", decided("mi300x", RAILS, TWO, {"NCCL_IB_HCA": ""}))
    assert (item.value, item.reason) == ("", "empty: not to be set")
    assert item.overrode[0].value == "=mlx5_0:1,mlx5_10:1"


def test_a_conflict_is_told_with_the_reason_of_the_layer() -> None:
    result = decided("mi355x", environ={"RCCL_WARP_SPEED_AUTO": "1", "HSA_ENABLE_SDMA": "1"})
    assert result.warnings == (
        "RCCL_WARP_SPEED_AUTO: keeping the value of user; gfx950 recommends 0: else the loss becomes NaN",
    )
    assert choice("HSA_ENABLE_SDMA", result).overrode == ()


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("NCCL_IB_TIMEOUT", "300", "valid values are 1 to 22"),
        ("NCCL_DEBUG", "ERROR", "valid values are VERSION, WARN, INFO, TRACE"),
        ("RCCL_DEBUG", "WARN", "does not read RCCL_DEBUG"),
    ],
)
def test_values_that_the_libraries_do_not_document_are_told(name: str, value: str, complaint: str) -> None:
    result = decided(environ={name: value})
    assert complaint in result.warnings[0]
    assert choice(name, result).value == value
    assert not decided(environ={"NCCL_IB_TIMEOUT": "22", "NCCL_DEBUG": "warn"}).warnings


@pytest.mark.parametrize("value", ["10.0.0.1", "=10.0.0.1", "eth0,10.0.0.1", "fd00::1"])
def test_an_address_in_place_of_an_interface_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="is an IP address"):
        decided(environ={"NCCL_SOCKET_IFNAME": value})
    with pytest.raises(UsageError, match="is an IP address"):
        decided(hooks={"GLOO_SOCKET_IFNAME": Typed(value, "hooks/00_net.sh")})


@pytest.mark.parametrize("value", ["eth0", "=eth0,eth1", "^docker,lo", "ib", "eth0.100", ""])
def test_names_of_interfaces_are_not(value: str) -> None:
    assert choice("NCCL_SOCKET_IFNAME", decided(environ={"NCCL_SOCKET_IFNAME": value})).value == value


def test_deterministic_mode_wins_over_profiles() -> None:
    amd = decided(environ={"PRIMUS_DETERMINISTIC": "1"}).variables
    assert (amd["NCCL_ALGO"].value, amd["NCCL_ALGO"].layer) == ("Ring", "deterministic")
    assert amd["ROCBLAS_DEFAULT_ATOMICS_MODE"].value == "0"
    assert "CUBLAS_WORKSPACE_CONFIG" not in amd
    nvidia = decided("h100", typed={"PRIMUS_DETERMINISTIC": Typed("1")}).variables
    assert nvidia["CUBLAS_WORKSPACE_CONFIG"].value == ":4096:8"
    assert "ROCBLAS_DEFAULT_ATOMICS_MODE" not in nvidia
    assert "NCCL_ALGO" not in decided(environ={"PRIMUS_DETERMINISTIC": "0"}).variables


def test_deterministic_mode_and_a_contradicting_user_are_an_error() -> None:
    with pytest.raises(UsageError, match=r"needs NCCL_ALGO=Ring: user \(environment\) has 'Tree'"):
        decided(environ={"PRIMUS_DETERMINISTIC": "1", "NCCL_ALGO": "Tree"})
    with pytest.raises(UsageError, match=r"needs NCCL_ALGO=Ring: hook \(h.sh\) has 'Tree'"):
        decided(environ={"PRIMUS_DETERMINISTIC": "1"}, hooks={"NCCL_ALGO": Typed("Tree", "h.sh")})
    agreed = decided(environ={"PRIMUS_DETERMINISTIC": "1", "NCCL_ALGO": "Ring"}).variables["NCCL_ALGO"]
    assert agreed.layer == "user"


def test_rocms_libraries_come_behind_the_users_folders_and_once() -> None:
    def path(environ: dict[str, str], library: str | None = "/opt/rocm/lib") -> str | None:
        item = decided(environ=environ, rocm_library=library).variables.get("LD_LIBRARY_PATH")
        return item.value if item else None

    assert path({}) == "/opt/rocm/lib"
    assert path({"LD_LIBRARY_PATH": "/mine"}) == "/mine:/opt/rocm/lib"
    assert path({"LD_LIBRARY_PATH": "/opt/rocm/lib:/mine"}) == "/opt/rocm/lib:/mine"
    assert path({"LD_LIBRARY_PATH": ""}) == ""
    assert path({}, library=None) is None


def test_rocms_libraries_are_where_the_user_says_or_in_the_usual_place(tmp_path: Path) -> None:
    assert find_rocm_library({}, tmp_path) is None
    (tmp_path / "opt/rocm/lib").mkdir(parents=True)
    assert find_rocm_library({"ROCM_HOME": "/nowhere"}, tmp_path) == "/opt/rocm/lib"
    (tmp_path / "custom/lib").mkdir(parents=True)
    assert find_rocm_library({"ROCM_PATH": "/custom/"}, tmp_path) == "/custom/lib"


def test_the_hugging_face_cache_is_beside_the_data() -> None:
    assert choice("HF_HOME", decided("cpu", environ={"DATA_PATH": "/data/"})).value == "/data/huggingface"
    kept = decided("cpu", environ={"DATA_PATH": "/data", "HF_HOME": "/mine"})
    assert choice("HF_HOME", kept).value == "/mine"


def test_a_layer_that_chooses_devices_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "architectures").mkdir()
    (tmp_path / "architectures/greedy.yaml").write_text(
        "settings: {HIP_VISIBLE_DEVICES: {value: 0, reason: mine, source: a test}}\n"
    )
    monkeypatch.setenv("PRIMUS_PLUGINS", str(tmp_path))
    facts = build_assumed_machine("mi300x:1")
    device = structs.replace(facts.devices[0], model=None, name=None, architecture="greedy")
    with pytest.raises(PrimusError, match="layer 'greedy' sets HIP_VISIBLE_DEVICES"):
        decided(structs.replace(facts, devices=(device,)))


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize("model", ["mi300x", "mi250x", "h100", "b200"])
def test_native_gets_nothing_of_other_backends(model: str) -> None:
    names = decided(model, layout=TWO, workload=JobWorkload(framework="native")).variables
    foreign = (CONNECTIONS, "NVTE_", "PRIMUS_TURBO_", "NCCL_NVLS_ENABLE", "XLA_", "NVLINK_DOMAIN_SIZE")
    assert not [name for name in names if name.startswith(foreign)]


@pytest.mark.parametrize(
    ("model", "layout", "value"),
    [
        ("h100", {"tensor": 8}, "1"),
        ("h100", {"context": 2}, "1"),
        ("mi300x", {"tensor": 2}, "1"),
        ("h100", {"options": {"use_torch_fsdp2": True}}, "32"),
        ("mi355x", {"options": {"use_megatron_fsdp": True}, "tensor": 2}, "32"),
        ("mi300x", {"options": {"use_torch_fsdp2": False}}, "1"),
        ("h100", {"options": {"overlap_moe_expert_parallel_comm": True}, "expert": 8}, "32"),
        ("b200", {"tensor": 8}, "32"),
    ],
)
def test_the_layout_decides_the_number_of_queues_of_megatron(model: str, layout: dict[str, object], value: str) -> None:
    item = choice(CONNECTIONS, decided(model, workload=JobWorkload(framework="megatron", **layout)))  # type: ignore[arg-type]
    assert (item.value, item.layer) == (value, "backend:megatron")


def test_multiprocessors_are_left_to_communication_only_where_a_layout_communicates() -> None:
    margin = "NVTE_FWD_LAYERNORM_SM_MARGIN"
    assert margin not in decided("h100").variables
    assert choice(margin, decided("h100", workload=JobWorkload(framework="megatron", tensor=2))).value == "20"


@pytest.mark.parametrize(("model", "value"), [("mi300x", "1"), ("mi325x", "1"), ("mi355x", "0"), ("mi250x", "0")])
def test_turbo_sums_with_fp32_atomics_on_cdna_3_as_amd_documents(model: str, value: str) -> None:
    assert choice("PRIMUS_TURBO_ATTN_V3_ATOMIC_FP32", decided(model)).value == value
    names = decided(model, workload=JobWorkload(framework="torchtitan")).variables
    assert names["PRIMUS_TURBO_ATTN_V3_ATOMIC_FP32"].value == value
    assert not [name for name in names if name.startswith("NVTE_")]


def test_transformer_engine_sums_with_fp32_atomics_on_cdna_3_only() -> None:
    assert choice("NVTE_CK_IS_V3_ATOMIC_FP32", decided("mi300x")).value == "1"
    assert "NVTE_CK_IS_V3_ATOMIC_FP32" not in decided("mi355x").variables


@pytest.mark.parametrize(("torch", "is_set"), [("2.7.1", True), ("2.8.0", False), ("2.13.0", False), (None, False)])
def test_record_streams_are_avoided_by_variable_before_torch_2_8_only(torch: str | None, is_set: bool) -> None:
    assert ("TORCH_NCCL_AVOID_RECORD_STREAMS" in decided("h100", torch=torch).variables) is is_set


@pytest.mark.parametrize(("model", "domain"), [("gb200", ("72", "1")), ("b200", ("8", "0"))])
def test_experts_know_how_far_nvlink_reaches(model: str, domain: tuple[str, str]) -> None:
    found = decided(model, RAILS, TWO, workload=JobWorkload(framework="megatron", expert=8)).variables
    assert (found["NVLINK_DOMAIN_SIZE"].value, found["USE_MNNVL"].value) == domain
    assert ("NCCL_MNNVL_ENABLE" in found) is (model == "gb200")


@pytest.mark.parametrize(
    ("rocm", "plugin"),
    [("7.2.1", "none"), ("7.10.0", "none"), ("7.2.0-43", "librccl-anp.so"), ("6.4.3", "librccl-anp.so"), (None, None)],
)
def test_rccl_has_the_plugin_of_ainic_inside_from_rocm_7_2_1_on(rocm: str | None, plugin: str | None) -> None:
    facts = structs.replace(build_assumed_machine("mi355x"), software=Software(rocm=rocm))
    found = decided(facts, Network(hcas=("ionic_0:1",), nic_kind="ainic"), TWO).variables
    assert (found["NCCL_NET_PLUGIN"].value if "NCCL_NET_PLUGIN" in found else None) == plugin


def test_what_the_adapters_are_configured_for_wins_over_their_usual_traffic_class() -> None:
    facts = structs.replace(build_assumed_machine("mi355x"), traffic_classes=(40, 184))
    found = decided(facts, Network(hcas=("ionic_0:1",), nic_kind="ainic"), TWO).variables
    assert (found["NCCL_IB_TC"].value, found["NCCL_IB_FIFO_TC"].value) == ("40", "184")
    assert [(lost.layer, lost.value) for lost in found["NCCL_IB_TC"].overrode] == [("nic:ainic", "104")]


def test_slingshot_is_reached_by_libfabric_and_not_by_verbs() -> None:
    facts = build_assumed_machine("mi250x", "slingshot")
    found = decided(facts, choose_network(facts, 2, {}), TWO).variables
    assert found["FI_CXI_DEFAULT_CQ_SIZE"].layer == "nic:slingshot"
    assert found["NCCL_CROSS_NIC"].value == "1" and found["NCCL_IB_GID_INDEX"].value is None
    assert "NCCL_IB_HCA" not in found


def test_a_value_typed_last_shows_those_of_the_file_and_of_the_shell_that_it_beat() -> None:
    values = GivenVariables(
        shell={"NCCL_DEBUG": "WARN"},
        given={"NCCL_DEBUG": Typed("INFO")},
        typed=({"NCCL_DEBUG": Typed("VERSION", "--env-file")}, {"NCCL_DEBUG": Typed("TRACE", "--env")}),
    )
    result = build_environment(JobNode(facts=build_assumed_machine("cpu"), network=NO_NETWORK), values)
    lost = [(lost.layer, lost.value) for lost in choice("NCCL_DEBUG", result).overrode]
    assert lost == [("--env", "VERSION"), ("user", "WARN"), ("experiment", "INFO")]


@pytest.mark.parametrize(
    ("values", "layout", "problems"),
    [
        ({"MODE": "off", "OVERRIDE_FILE": "/t.txt"}, ONE, []),
        ({"MODE": "always", "CACHE_PATH": "/c"}, ONE, ["valid values are off, cache, tune"]),
        ({"MODE": "cache"}, ONE, ["no effect without HIPBLASLT_TUNING_CACHE_PATH"]),
        ({"MODE": "cache", "CACHE_PATH": "/c"}, ONE, []),
        ({"MODE": "tune", "CACHE_PATH": "/c"}, ONE, ["8 processes write one file"]),
        ({"MODE": "tune", "CACHE_PATH": "/c"}, TWO, ["16 processes write one file"]),
        ({"MODE": "tune", "CACHE_PATH": "/c"}, ClusterLayout(nproc=1), []),
        ({"MODE": "cache", "CACHE_PATH": "/c", "OVERRIDE_FILE": "/t.txt"}, ONE, ["ignores HIPBLASLT_TUNING_OVERRIDE"]),
    ],
)
def test_settings_of_hipblaslt_that_cancel_each_other_are_warned_of(
    values: dict[str, str], layout: ClusterLayout, problems: list[str]
) -> None:
    environ = {f"HIPBLASLT_TUNING_{name}": value for name, value in values.items()}
    found = [each for each in decided(environ=environ, layout=layout).warnings if "HIPBLASLT" in each]
    assert len(found) == len(problems) and all(part in each for part, each in zip(problems, found, strict=True))


def test_a_deterministic_run_refuses_kernels_that_are_chosen_by_timing() -> None:
    environ = {"PRIMUS_DETERMINISTIC": "1", "HIPBLASLT_TUNING_MODE": "tune"}
    with pytest.raises(UsageError, match="HIPBLASLT_TUNING_MODE=off"):
        decided(environ=environ)
