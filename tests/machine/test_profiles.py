"""Device models: figures that can be true, names that mean one model, layers in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from primus import registry
from primus.errors import UsageError
from primus.machine import profile
from primus.machine.profile import Profile
from primus.machine.profiles.checks import check_profile
from primus.preflight.findings.thresholds import FLOORS

PROFILES = profile.load_all_profiles()


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of plug-ins that is in force."""
    monkeypatch.setenv("PRIMUS_PLUGINS", str(tmp_path))
    for kind in ("profiles", "architectures"):
        (tmp_path / kind).mkdir()
    _forget()
    yield tmp_path
    _forget()


def _forget() -> None:
    for cached in (
        profile.load_all_profiles,
        profile._load_profile,
        profile._load_layer,
        profile._read_file,
        profile._index_by_id,
        profile._index_by_name,
        registry._index_folders,
    ):
        cached.cache_clear()


@pytest.mark.parametrize("model", PROFILES, ids=lambda one: one.model)
def test_figures_obey_the_rules_of_the_hardware(model: Profile) -> None:
    peaks = model.peaks
    check_profile(model, model.model)
    assert model.source
    halves = 2 if model.architecture == "gfx908" else 1  # MI100 has bf16 at half the rate of fp16
    assert peaks.get("fp16") == pytest.approx(halves * peaks.get("bf16", 0), rel=0.002) or "fp16" not in peaks
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.002 if model.vendor == "amd" else 0.02)
        assert model.fp8_format == ("e4m3fnuz" if model.architecture == "gfx942" else "e4m3fn")
    if model.architecture == "gfx950":
        assert peaks["fp4"] == pytest.approx(2 * peaks["fp8"], rel=0.002)
    if model.vendor == "amd":
        assert set(peaks) == set(model.flop_per_clock)
        for dtype, flop in model.flop_per_clock.items():
            assert peaks[dtype] == pytest.approx(model.compute_units * model.clock_mhz * flop / 1e6, rel=0.002)
    for test, floor in model.floors.items():
        assert floor.source and floor.value > 0
        assert floor.unit == ("TFLOP/s" if test.startswith("gemm_") else "GB/s")
        if test.startswith("gemm_"):
            assert floor.value < peaks[test.removeprefix("gemm_")]
        if test.startswith("memory_"):
            assert floor.value < model.memory_gb_per_s
    for dtype, value in model.achieved.items():
        assert value < peaks[dtype]


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H100 94GB HBM2e", "bf16", 989.4),
        ("NVIDIA H200 NVL", "fp8", 1671),
        ("NVIDIA B200", "fp32", 75),
        ("NVIDIA B200", "tf32", 1125),
        ("NVIDIA B300", "fp4", 13125),
        ("AMD Instinct MI100", "fp16", 184.6),
    ],
)
def test_a_peak_is_known_and_not_that_of_a_namesake(name: str, dtype: profile.Dtype, peak: float) -> None:
    assert profile.find_peak_tflops(name, dtype) == peak


def test_every_floor_is_of_a_test_that_is_measured() -> None:
    assert {test for model in PROFILES for test in model.floors} <= set(FLOORS)


def test_names_and_device_ids_are_unique() -> None:
    ids = [(model.vendor, number) for model in PROFILES for number in model.device_ids]
    names = [profile._normalize_name(name) for model in PROFILES for name in (model.model, *model.names)]
    assert len(set(ids)) == len(ids)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("model", "nominal_gib"), [("MI210", 64), ("MI300X", 192), ("MI308X", 192), ("MI325X", 256), ("MI355X", 288)]
)
def test_amd_memory_is_the_nominal_gib_less_16_mib(model: str, nominal_gib: int) -> None:
    assert profile.find_profile(model).memory_bytes == (nominal_gib * 1024 - 16) * profile.MIB


def test_virtual_functions_follow_the_numbers_of_their_family() -> None:
    for first, offset in (("gfx942", 0x14), ("gfx950", 0x10)):
        for model in PROFILES:
            if model.architecture == first:
                assert {number + offset for number in model.device_ids[::2]} == set(model.device_ids[1::2])


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD_Instinct_MI300X_OAM", "MI300X"),
        ("AMD Instinct MI300A", "MI300A"),
        ("AMD Instinct MI250X / MI250", "MI250X"),
        ("AMD Radeon Graphics", None),
        ("AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2", None),
        ("AMD Instinct MI300", None),
        ("NVIDIA H2000", None),
        ("NVIDIA Quadro T100", None),
        ("ip discovery", None),
        ("", None),
    ],
)
def test_a_name_means_the_longest_whole_words_in_it(text: str, model: str | None) -> None:
    found = profile.find_profile_by_name(text)
    assert (found.model if found else None) == model


@pytest.mark.parametrize(
    ("number", "model"),
    [
        (0x74A1, "MI300X"),
        (0x74B5, "MI300X"),
        (0x74A2, "MI308X"),
        (0x7408, "MI250X"),
        (0x75A3, "MI355X"),
        (30112, "MI350X"),
    ],
)
def test_an_oems_card_is_known_by_its_id(number: int, model: str) -> None:
    found = profile.find_profile_by_id("amd", number)
    assert found and found.model == model


def test_an_id_is_of_one_vendor() -> None:
    assert profile.find_profile_by_id("nvidia", 0x74A1) is None
    assert profile.find_profile_by_id("amd", 0x7410) is None, "a virtual gfx90a whose model is not known"
    assert profile.find_profile_by_id("nvidia", 0x22A3) is None, "an NVSwitch is no GPU"


def test_the_peak_is_that_of_the_device_as_torch_names_it_and_unknown_otherwise() -> None:
    assert profile.find_peak_tflops("NVIDIA H100 80GB HBM3", "bf16") == 989.4
    assert profile.find_peak_tflops("NVIDIA H100 PCIe", "bf16") == 756
    assert profile.find_peak_tflops("NVIDIA H800", "bf16") is None
    assert profile.find_peak_tflops("AMD Instinct MI300X OAM", "bf16") == 1307.4
    assert profile.find_peak_tflops("AMD Instinct MI250X", "bf16") == 191.5, "one die of two"
    assert profile.find_peak_tflops("AMD Instinct MI210", "fp8") is None
    assert profile.find_peak_tflops("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16") is None, "a slice is not the card"
    for unknown in ("Intel Xeon", "AMD Instinct MI350P", "AMD Instinct MI455X", "AMD Radeon Graphics", "NVIDIA H20"):
        assert profile.find_peak_tflops(unknown, "bf16") is None


@pytest.mark.parametrize("word", ["mi355x", "MI355X", "Mi-355x"])
def test_a_model_is_typed_as_people_type(word: str) -> None:
    assert profile.find_profile(word).model == "MI355X"


def test_a_model_that_is_not_known_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown GPU model 'mi335x'") as error:
        profile.find_profile("mi335x")
    assert error.value.hint.startswith("did you mean 'mi3")


def test_layers_go_from_what_is_common_to_the_model() -> None:
    assert [name for name, _ in profile.list_layers(profile.find_profile("mi300x"))] == [
        "base",
        "gpu",
        "amd",
        "gfx942",
        "mi300x",
    ]
    assert [name for name, _ in profile.list_layers(profile.find_profile("gb300"))] == [
        "base",
        "gpu",
        "nvidia",
        "sm100",
        "sm103",
        "gb300",
    ]


def test_every_architecture_and_adapter_is_of_its_file() -> None:
    for name in registry.list_plug_ins("architectures"):
        assert profile.list_architecture_layers(name)[-1][0] == name
    for model in PROFILES:
        assert model.architecture in registry.list_plug_ins("architectures")
    for name in registry.list_plug_ins("nics"):
        adapter = profile.load_nic(name)
        assert adapter and adapter.kind == name


def test_every_setting_has_a_reason_and_a_source() -> None:
    layers = [layer for model in PROFILES for _, layer in profile.list_layers(model)]
    layers += [profile.load_nic(name).settings for name in registry.list_plug_ins("nics")]
    for name, setting in ((name, setting) for layer in layers for name, setting in layer.items()):
        assert setting.reason and setting.source, name


CDNA3 = "vendor: amd\ncompute_units: 304\nclock_mhz: 2100\nflop_per_clock: {bf16: 2048, fp16: 2048}\n"
AMD, NVIDIA = "vendor: amd\n", "vendor: nvidia\n"
REST = "model: X1\narchitecture: gfx942\nsource: a test\nmemory_gb_per_s: 5300\n"


@pytest.mark.parametrize(
    ("figures", "complaint"),
    [
        (CDNA3 + "peaks: {bf16: 1307.4, fp16: 2615}", "peak fp16 is 2615.0, units x clock x FLOP is 1307.4"),
        (CDNA3 + "peaks: {bf16: 330, fp16: 330}", "peak bf16 is 330"),
        (CDNA3 + "peaks: {bf16: 1307.4}", "peak fp16 is None"),
        (AMD + "peaks: {fp8: 100, fp4: 300}", "peak fp4 is 300.0, not 2 x fp8 100"),
        (NVIDIA + "peaks: {bf16: 2250, fp16: 2250, fp8: 9000}", "peak fp8 is 9000.0, not 2 x bf16 2250"),
        (NVIDIA + "peaks: {bf16: 3500, fp8: 4500}", "peak fp8 is 4500.0, not 2 x bf16 3500"),
        (NVIDIA + "peaks: {bf16: 362, fp8: 1466}", "peak fp8 is 1466.0, not 2 x bf16 362"),
        (
            AMD + "floors: {memory_copy: {value: 5525.4, unit: GB/s, source: a thresholds file}}",
            "floor memory_copy 5525.4 is above the peak 5300",
        ),
        (
            NVIDIA + "peaks: {bf16: 100}\nfloors: {gemm_bf16: {value: 130600, unit: TFLOP/s, source: a page}}",
            "floor gemm_bf16 130600.0 is above the peak 100",
        ),
        (NVIDIA + "peaks: {bf16: 100}\nachieved: {bf16: 101}", "achieved bf16 101.0 is above the peak 100"),
    ],
)
def test_a_profile_that_cannot_be_true_is_rejected(plug_ins: Path, figures: str, complaint: str) -> None:
    (plug_ins / "profiles/x1.yaml").write_text(REST + figures)
    with pytest.raises(UsageError) as error:
        profile.load_all_profiles()
    assert f"profiles/x1.yaml: X1: {complaint}" in error.value.problem


SETTING = "settings: {A: {value: 1, reason: why, source: where, "


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("memory_gb_per_sec: 1", "x1.yaml:6: unknown key 'memory_gb_per_sec'; did you mean 'memory_gb_per_s'?"),
        ("device_ids: [0x74A1, zero]", "x1.yaml:6: device_ids: expected a number such as 0x74A1, got 'zero'"),
        ("memory_bytes: 192 gigs", "x1.yaml:6: memory_bytes: expected a size such as '1024 MiB', got '192 gigs'"),
        ("hive_size: many", "x1.yaml:6: hive_size: Expected 'int | null', got 'str'"),
        ("link_layout: ring", "x1.yaml:6: link_layout: Invalid enum value 'ring'"),
        ("peaks: {int9: 4}", "x1.yaml:6: peaks: Invalid enum value 'int9'"),
        (SETTING + "wen: rdma}}", "x1.yaml:6: unknown key 'wen'; did you mean 'when'?"),
        (SETTING + "when: on sundays}}", "x1.yaml:6: when: Invalid enum value 'on sundays'"),
        (
            "settings: {A: 1}",
            "x1.yaml:6: settings.A: expected a mapping with value, reason, source, when, alternatives",
        ),
        ("settings: {A: {value: 1}}", "x1.yaml: missing field 'reason'"),
        ("model: X2", "x1.yaml:6: key 'model' is given twice"),
        ("peaks: [", "x1.yaml:7: "),
        ("extends: mi999x", "x1.yaml: extends: no profile 'mi999x'"),
        ("extends: [h100, h200]", "x1.yaml: extends: expected the name of one file"),
        ("extends: x1", "x1.yaml: extends: the file extends itself"),
    ],
)
def test_a_mistake_in_a_profile_is_named_with_its_line(plug_ins: Path, text: str, complaint: str) -> None:
    (plug_ins / "profiles/x1.yaml").write_text(f"vendor: amd\n{REST}{text}\n")
    with pytest.raises(UsageError) as error:
        profile.find_profile("x1")
    assert complaint in error.value.problem


def test_a_profile_takes_over_what_it_extends_but_not_what_was_measured(plug_ins: Path) -> None:
    (plug_ins / "profiles/x1.yaml").write_text(
        "extends: mi325x\nmodel: X1\nsource: a test\npcie_gts: null\nmemory_bytes: 300000000000\n"
    )
    found, base = profile.find_profile("x1"), profile.find_profile("mi325x")
    assert (found.vendor, found.peaks, found.server_sizes) == (base.vendor, base.peaks, base.server_sizes)
    assert (found.pcie_gts, found.memory_bytes) == (None, 300_000_000_000)
    assert base.floors and base.achieved and base.device_ids
    assert (found.floors, found.achieved, found.device_ids, found.source) == ({}, {}, (), "a test")
    assert profile.find_profile("gb300").settings == profile.find_profile("gb200").settings != {}


def test_a_variable_has_the_text_that_was_written(plug_ins: Path) -> None:
    values = {"A": "1", "B": ".97", "C": "FALSE", "D": "0x10", "E": "no", "F": "010"}
    rows = "".join(f"  {name}: {{value: {value}, reason: why}}\n" for name, value in values.items())
    (plug_ins / "architectures/x.yaml").write_text(
        f"source: a test\nsettings:\n{rows}  G: {{value: null, reason: no}}\n"
    )
    settings = profile.list_architecture_layers("x")[0][1]
    assert {name: setting.value for name, setting in settings.items()} == {**values, "G": None}
    assert {setting.source for setting in settings.values()} == {"a test"}


def test_a_file_is_named_after_its_model(plug_ins: Path) -> None:
    (plug_ins / "profiles/other.yaml").write_text("extends: h100\nmodel: X1\nsource: a test\n")
    with pytest.raises(UsageError, match=r"other\.yaml: the file describes the model 'X1'"):
        profile.find_profile("other")


def test_a_model_is_one_file_as_the_guide_shows_it(plug_ins: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/environment.md").read_text()
    (plug_ins / "profiles/mi999x.yaml").write_text(guide.split("```yaml\n")[1].split("```")[0])
    found = profile.find_profile_by_id("amd", 0x9999)
    assert found is profile.find_profile("mi999x")
    assert [name for name, _ in profile.list_layers(found)][-2:] == ["gfx950", "mi999x"]
    assert found.settings["GPU_MAX_HW_QUEUES"].value == "4"


def test_a_ring_of_architectures_is_rejected(plug_ins: Path) -> None:
    (plug_ins / "architectures/ring.yaml").write_text("extends: ring\n")
    with pytest.raises(UsageError, match="'ring' extends itself"):
        profile.list_architecture_layers("ring")
    _forget()
    (plug_ins / "architectures/ends.yaml").write_text("extends: gfx9\n")
    with pytest.raises(UsageError, match="no architecture 'gfx9'"):
        profile.list_architecture_layers("ends")


def test_a_machine_without_accelerators_has_a_profile_that_no_device_is_taken_for() -> None:
    assert profile.list_layers(profile.find_profile("cpu")) == [*profile.list_architecture_layers("base"), ("cpu", {})]
    assert profile.find_profile_by_name("Some CPU") is None
