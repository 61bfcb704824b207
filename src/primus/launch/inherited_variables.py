"""Variables of the user's shell that a run reads, and that are passed to nodes that do not inherit them."""

from __future__ import annotations

from collections.abc import Mapping

from primus.launch.variables import is_name

FAMILIES = tuple(
    "PRIMUS_ SLURM_ PET_ MASTER_ NCCL_ RCCL_ MSCCL HSA_ HIP_ ROCR_ CUDA_ CUBLAS CUDNN_ GPU_ AMD_ HIPBLASLT_ ROCBLAS_ "
    "MIOPEN_ AITER_ CK_ NVTE_ TORCH PYTORCH_ TRITON_ GLOO_ UCX_ FI_ IBV_ OMP_ KMP_ GOMP_ MKL_ NUMEXPR_ HF_ "
    "TRANSFORMERS_ TOKENIZERS_ WANDB_ MLFLOW_ KINETO_ XLA_ JAX_ TE_ TENSORBOARD_".split()
)
NAMES = frozenset(
    "NNODES NODE_RANK GPUS_PER_NODE HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy DATA_PATH "
    "TOKENIZED_DATA_PATH BACKEND_PATH MEGATRON_PATH TORCHTITAN_PATH MAXTEXT_PATH USING_AINIC REBUILD_PRIMUS_TURBO "
    "GPU_ARCHS REBUILD_BNXT PATH_TO_BNXT_TAR_PACKAGE "
    "ENABLE_NUMA_BINDING SDMA_ALL_GATHER PATCH_TE_FLASH_ATTN DUMP_HLO DUMP_HLO_DIR".split()
)
"""In addition to the prefixes, variables that a run reads: the layout of the launch, and settings of libraries and
experiment trackers (from their documentation and that of AMD-AGI/Primus)."""
KEPT_OUT = frozenset(
    "CUDA_HOME CUDA_PATH CUDA_ROOT HIP_PATH HSA_PATH PRIMUS_PYTHON PRIMUS_CONTAINER_ENGINE PRIMUS_LAUNCHER_FILE "
    "PRIMUS_LAUNCHER_PID PRIMUS_PROGRESS PRIMUS_SAFE_TOKEN SLURM_JWT SLURM_CONF".split()
)
"""Paths of this machine's software, which would hide those of the other machine, and state of this process."""


HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH")
"""Paths of this machine's software that are removed where a container engine passes all variables on."""


def list_inherited_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the variables that are set and that a run needs."""
    return tuple(sorted(name for name in environ if _is_read(name)))


def _is_read(name: str) -> bool:
    is_wanted = name in NAMES or name.startswith(FAMILIES)
    return is_wanted and name not in KEPT_OUT and is_name(name)
