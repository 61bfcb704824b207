"""Signatures of GPUs, as their runtimes report them."""

from __future__ import annotations

from primus.diagnosis.signature import Signature, SignaturePattern, signs

SIGNATURES = (
    Signature(
        name="gpu-out-of-memory",
        role="root",
        action="stop",
        signs=(
            *signs("HIP out of memory", "CUDA out of memory", "hipErrorOutOfMemory"),
            *signs("CUBLAS_STATUS_ALLOC_FAILED", "HIPBLAS_STATUS_ALLOC_FAILED", "RESOURCE_EXHAUSTED: Out of memory"),
            SignaturePattern("OutOfMemoryError", r"torch\.(cuda\.)?OutOfMemoryError"),
            SignaturePattern("'out of memory'", r"(Cuda|CUDA|HIP) failure( \d+)? 'out of memory'"),
            *signs("Failed to CUDA calloc", "OOM when allocating tensor", "CUDA error: out of memory"),
            *signs("HIP error: out of memory", "CUDA_ERROR_OUT_OF_MEMORY"),
        ),
        systems=("AMD", "NVIDIA"),
        cause="a GPU ran out of memory",
        fix="use --micro_batch_size 1 or --recompute_activations true, shard further, or set --env "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; `direct -- preflight --gpu` shows processes left on a GPU",
        source="pytorch/pytorch#175431",
    ),
    Signature(
        name="gpu-page-fault",
        role="root",
        action="stop",
        first_action="retry",
        signs=signs("Memory access fault by GPU"),
        systems=("AMD",),
        cause="a kernel on a GPU touched memory that is not mapped",
        fix="bisect the fused operations; HSA_ENABLE_COREDUMP=1 or a debug build shows the kernel",
        source="ROCm/ROCm#4021",
    ),
    Signature(
        name="gpu-illegal-access",
        role="root",
        action="stop",
        first_action="retry",
        signs=(
            *signs("an illegal memory access was encountered", "CUDA_ERROR_ILLEGAL_ADDRESS", "hipErrorIllegalAddress"),
            *signs("unspecified launch failure", "misaligned address", "an illegal instruction was encountered"),
            *signs("hipErrorLaunchFailure", "CUDA_ERROR_LAUNCH_FAILED", "the launch timed out and was terminated"),
        ),
        systems=("NVIDIA", "AMD"),
        cause="a kernel on a GPU touched memory that is not its own",
        fix="bisect the fused operations with --env CUDA_LAUNCH_BLOCKING=1 (AMD: AMD_SERIALIZE_KERNEL=3)",
        source="pytorch/pytorch#21819",
    ),
    Signature(
        name="hsa-exception",
        role="root",
        action="stop",
        first_action="retry",
        signs=(
            *signs("HSA_STATUS_ERROR_EXCEPTION", "HSA_STATUS_ERROR_ILLEGAL_INSTRUCTION", "HSA_STATUS_ERROR_MEMORY_"),
            SignaturePattern("HSA_STATUS_ERROR: "),
            SignaturePattern("HSA_STATUS_ERROR_", r"HSA_STATUS_ERROR_(INVALID|INCOMPATIBLE|OUT_OF_RES(?!.*[Hh]ang))"),
        ),
        systems=("AMD",),
        cause="a GPU kernel raised a hardware exception",
        fix="update the kernel library, and check that it was built for this architecture: `direct -- env show`",
        source="ROCm/ROCm#6023",
    ),
    Signature(
        name="gpu-hang",
        role="root",
        action="exclude",
        signs=(
            SignaturePattern("HW Exception by GPU", r"GPU Hang"),
            SignaturePattern("HSA_STATUS_ERROR_OUT_OF_RESOURCES", r"GPU [Hh]ang"),
        ),
        systems=("AMD",),
        cause="a GPU hung",
        fix="drain the node and reset its GPUs; `direct -- preflight --gpu` checks them",
        source="sgl-project/sglang PR#31068; ROCm/legacy-rocm-build#5259",
    ),
    Signature(
        name="wrong-gpu-architecture",
        role="root",
        action="stop",
        signs=(
            *signs("invalid device function", "no kernel image is available", "hipErrorNoBinaryForGpu"),
            *signs("code object is not supported for the current GPU", "Cannot find CUDA device kernel image"),
            SignaturePattern(
                "rocBLAS error", r"rocBLAS error: (Cannot read .*TensileLibrary|Could not initialize Tensile)"
            ),
            *signs("is not compatible with the current PyTorch installation", "Illegal seek for GPU arch"),
        ),
        systems=("AMD", "NVIDIA"),
        cause="kernels were not built for this GPU's architecture",
        fix="use the image that was built for this GPU, or rebuild with PYTORCH_ROCM_ARCH (NVIDIA: "
        "TORCH_CUDA_ARCH_LIST)",
        source="ROCm/TheRock#8151",
    ),
    Signature(
        name="gpu-uncorrectable-ecc",
        role="root",
        action="exclude",
        strength="certain",
        signs=(
            *signs("uncorrectable ECC error encountered", "uncorrectable NVLink error"),
            SignaturePattern("uncorrectable hardware error", r"uncorrectable hardware errors? detected in .* block"),
            SignaturePattern("uncorrectable hardware error(", r"uncorrectable hardware error\(\w+\) detected"),
        ),
        systems=("NVIDIA", "AMD"),
        cause="a GPU's memory has errors that cannot be corrected",
        fix="drain the node; the GPU needs a reset, or a new one",
        source="jade-hpc-gpu.github.io#194; AMD-AGI/Primus-SaFE sys_dmesg_311.sh; ROCm/legacy-rocm-build#4021",
    ),
    Signature(
        name="gpu-lost",
        role="root",
        action="exclude",
        strength="certain",
        signs=(
            *signs("GPU has fallen off the bus", "fallen off the bus and is not responding", "GPU is lost"),
            SignaturePattern(
                "AER: Uncorrected", r"AER: Uncorrected \((Fatal|Non-Fatal)\) error received|AER: Uncorrected \(Fatal\)"
            ),
        ),
        systems=("NVIDIA", "any"),
        cause="a GPU fell off the PCIe bus",
        fix="drain the node; look at power, cabling, PCIe and firmware",
        source="wilicc/gpu-burn#1; NVIDIA/NVSentinel#155",
    ),
    Signature(
        name="gpu-ipc-handle",
        role="root",
        action="exclude",
        strength="certain",
        signs=signs("Failed to import IPC handle"),
        systems=("AMD",),
        cause="a GPU's memory could not be shared between processes",
        fix="run containers with --ipc host; otherwise reload the node's driver",
        source="AMD-AGI/Primus-SaFE monitor 012",
    ),
    Signature(
        name="gpu-device-rights",
        role="root",
        action="stop",
        signs=(
            SignaturePattern("Unable to open /dev/kfd", r"/dev/kfd.*(Permission denied|No such file)"),
            SignaturePattern("Failed to open /dev/dri/render", r"Permission denied"),
        ),
        systems=("AMD", "containers"),
        cause="the process may not open the GPU's device files",
        fix="join the groups of /dev/kfd and /dev/dri/renderD*, by number: the container runtime does, by hand it is "
        "--group-add GID",
        source="ROCm/ROCm-docker#116, #90",
    ),
    Signature(
        name="no-gpu-visible",
        role="root",
        action="stop",
        signs=(
            *signs("No HIP GPUs are available", "No CUDA GPUs are available", "no ROCm-capable device is detected"),
            *signs("no CUDA-capable device is detected", "Found no NVIDIA driver on your system"),
            *signs("invalid device ordinal", "CUDA_ERROR_DEVICE_UNAVAILABLE", "devices are busy or unavailable"),
            *signs("CUDA unknown error - this may be due to an incorrectly set up environment", "hipErrorNoDevice"),
            *signs("but torch.cuda.is_available() is False", "CUDA_ERROR_NO_DEVICE"),
            SignaturePattern("Failed to initialize NVML", r"Failed to initialize NVML: (?!Driver/library)"),
            SignaturePattern("nvidia-container-cli", r"nvidia-container-cli(\.real)?: (?!requirement error)\w+ error"),
        ),
        systems=("AMD", "NVIDIA"),
        cause="the process sees no such GPU",
        fix="compare `direct -- env show` with --nproc; look at HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES, and at "
        "the devices of the container",
        source="pytorch/pytorch#49081",
    ),
    Signature(
        name="gpu-driver-mismatch",
        role="root",
        action="exclude",
        signs=(
            *signs("Driver/library version mismatch", "CUDA driver version is insufficient for CUDA runtime version"),
            *signs(
                "The NVIDIA driver on your system is too old", "forward compatibility was attempted on non supported"
            ),
            SignaturePattern("nvidia-container-cli", r"nvidia-container-cli(\.real)?: requirement error"),
            *signs("the provided PTX was compiled with an unsupported toolchain", "amdgpu version file missing"),
            SignaturePattern("system not yet initialized", r"(CUDA|NVML|Error 802).*system not yet initialized"),
        ),
        systems=("NVIDIA",),
        cause="the node's driver does not fit the libraries, or its fabric manager is not running",
        fix="reboot or update the node; `direct -- preflight --host` compares the nodes",
        source="NVIDIA/nvidia-docker#1256",
    ),
    Signature(
        name="token-id-out-of-range",
        role="root",
        action="stop",
        signs=(
            *signs("device-side assert triggered", "Device-side assertion `"),
            SignaturePattern("Assertion `", r"\.(cu|hip):\d+: .*Assertion `"),
            SignaturePattern("index out of range in self"),
        ),
        systems=("AMD", "NVIDIA", "any"),
        cause="an index was out of range on the GPU, most often a token id of at least the vocabulary's size",
        fix="compare the tokenizer with vocab_size of the model: `direct -- config show`",
        source="well-known; pytorch/pytorch ATen/native/cuda/Indexing.cu",
    ),
)
