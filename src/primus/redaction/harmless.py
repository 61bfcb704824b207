"""Decide which variables of a user's shell may be written with their values: names and forms known to be harmless.

A list of secret names is never complete, so a variable whose name nobody knows is written by name and fingerprint only.
"""

from __future__ import annotations

import os
import re

from primus.redaction.names import is_secret_name

FAMILIES = tuple(
    "NCCL_ RCCL_ MSCCL UCCL_ MORI_ NVSHMEM_ OFI_NCCL_ GLOO_ UCX_ FI_ IBV_ RDMAV_ MLX5_ PMI_ PMIX_ OMPI_ I_MPI_ SLURM_ "
    "HSA_ HIP_ ROCR_ ROCM_ ROCBLAS_ ROCPROF ROCTX_ HIPBLASLT_ MIOPEN_ AITER_ CK_ GPU_ AMD_ CUDA_ CUBLAS CUDNN_ NVTE_ "
    "TE_ TORCH PYTORCH_ TRITON_ KINETO_ ATEN_ XLA_ JAX_ TF_CPP_ TENSORBOARD_ TOKENIZERS_ OMP_ KMP_ GOMP_ MKL_ "
    "OPENBLAS_ VECLIB_ NUMEXPR_ ONEDNN_ DNNL_ MALLOC_ JEMALLOC_ TCMALLOC_ GLIBC_ PYTHON PET_ PRIMUS_ LC_ XDG_".split()
)
"""Beginnings of the variables of libraries, schedulers and primus, which document no variable for a secret that
`is_secret_name` does not know."""
NAMES = frozenset(
    "PATH LD_LIBRARY_PATH LD_PRELOAD LIBRARY_PATH CPATH CC CXX CFLAGS CXXFLAGS MAX_JOBS HOME USER LOGNAME SHELL SHLVL "
    "TERM LANG LANGUAGE TZ PWD OLDPWD TMPDIR HOSTNAME VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV MODULEPATH "
    "LOADEDMODULES MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE NNODES NODE_RANK GPUS_PER_NODE NODELIST "
    "NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES NVIDIA_TF32_OVERRIDE DATA_PATH TOKENIZED_DATA_PATH BACKEND_PATH "
    "MEGATRON_PATH TORCHTITAN_PATH MAXTEXT_PATH HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_HUB_ENABLE_HF_TRANSFER "
    "HF_DATASETS_CACHE HF_DATASETS_OFFLINE TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE TRANSFORMERS_VERBOSITY WANDB_MODE "
    "WANDB_PROJECT WANDB_ENTITY WANDB_DIR WANDB_NAME WANDB_RUN_GROUP MLFLOW_TRACKING_URI MLFLOW_EXPERIMENT_NAME "
    "USING_AINIC REBUILD_PRIMUS_TURBO ENABLE_NUMA_BINDING SDMA_ALL_GATHER PATCH_TE_FLASH_ATTN DUMP_HLO".split()
)
_SWITCHES = frozenset("true false yes no on off none auto default".split())
_RANDOM = re.compile(r"(?=[A-Za-z0-9+=]*\d)(?=[A-Za-z0-9+=]*[A-Za-z])[A-Za-z0-9+=]{20,}")
"""A token of random characters: longer than each group of the id of a GPU (8-4-4-4-12)."""
_BETWEEN_ENTRIES = re.compile(r"[:;,\s]+")
LONGEST_NUMBER = 3
"""Digits of a number that cannot be a PIN."""


def is_harmless_variable(name: str, value: str) -> bool:
    """Whether a variable that the user's shell happens to have may be written with its value.

    Its value is still redacted: the address of a server may hold a password.
    """
    if is_secret_name(name):
        return False
    is_known = name in NAMES or name.startswith(FAMILIES)
    return _has_harmless_form(value) or (is_known and not _holds_random_token(value))


def _has_harmless_form(value: str) -> bool:
    """Whether a value cannot be a secret: empty, a switch, a short number, or folders and files that exist."""
    if value.lower() in _SWITCHES or (value.isdecimal() and len(value) <= LONGEST_NUMBER):
        return True
    return all(entry.startswith("/") and os.path.exists(entry) for entry in value.split(":") if entry)


def _holds_random_token(value: str) -> bool:
    entries = _BETWEEN_ENTRIES.split(value)
    return any(_RANDOM.search(entry) for entry in entries if not entry.startswith("/"))
