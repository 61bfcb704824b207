"""Megatron-LM: hardware queues, SM margins and NVLink settings for overlapping computation and communication."""

from __future__ import annotations

from primus.machine.profile import Library, Profile, Setting
from primus.machine.workload import JobWorkload

LIBRARIES: tuple[Library, ...] = ("transformer engine", "primus turbo")

ARGUMENTS = "NVIDIA/Megatron-LM training/arguments.py"
RECIPES = "NVIDIA-NeMo/Megatron-Bridge recipes"
FSDP = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")
BLACKWELL = ("sm100", "sm103")
SM_MARGIN = "20"
NVLINK_DOMAINS = {"GB200": "72", "GB300": "72", "B200": "8", "B300": "8"}
"""GPUs of an NVLink domain by model (Megatron-Bridge performance guide)."""


def list_settings(workload: JobWorkload, device: Profile | None) -> dict[str, Setting]:
    """Variables by the layout."""
    found = {"CUDA_DEVICE_MAX_CONNECTIONS": _choose_max_connections(workload, device)}
    if device is None or device.vendor != "nvidia":
        return found
    if device.architecture in ("sm90", *BLACKWELL):
        found["NCCL_NVLS_ENABLE"] = Setting(
            value="0", reason="memory for the model rather than for faster all-reduce in the switch", source=RECIPES
        )
        if max(workload.tensor, workload.context, workload.pipeline, workload.expert) > 1:
            margin = Setting(value=SM_MARGIN, reason="multiprocessors left to communication", source=RECIPES)
            found |= dict.fromkeys(("NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN"), margin)
    if workload.expert > 1 and device.model in NVLINK_DOMAINS:
        domain = NVLINK_DOMAINS[device.model]
        found["NVLINK_DOMAIN_SIZE"] = Setting(value=domain, reason="GPUs that share NVLink", source=RECIPES)
        found["USE_MNNVL"] = Setting(
            value=str(int(domain == "72")), reason="whether experts reach other nodes over NVLink", source=RECIPES
        )
    return found


def _choose_max_connections(workload: JobWorkload, device: Profile | None) -> Setting:
    """Queues between host and device: a single one preserves the order in which tensor and context parallelism overlap,
    FSDP needs several. Blackwell preserves the order by itself."""
    if workload.is_on(*FSDP):
        return Setting(value="32", reason="FSDP requires several queues to overlap communication", source=ARGUMENTS)
    if workload.is_on("overlap_moe_expert_parallel_comm") and workload.tensor == workload.context == 1:
        return Setting(value="32", reason="expert communication overlaps on separate queues", source=ARGUMENTS)
    if device is not None and device.architecture in BLACKWELL:
        return Setting(value="32", reason="Blackwell keeps the order without a shared queue", source=RECIPES)
    if max(workload.tensor, workload.context) > 1:
        reason = "one queue keeps the order in which tensor and context parallel overlap"
        return Setting(value="1", reason=reason, source=ARGUMENTS)
    return Setting(value="1", reason="as the existing launcher has it", source="AMD-AGI/Primus base_env.sh")
