"""Variables of a container: which are passed on, and which would change the engine's own client."""

from __future__ import annotations

import re
from collections.abc import Mapping

FAMILIES = tuple(
    "PRIMUS_ SLURM_ PET_ MASTER_ NCCL_ RCCL_ MSCCL HSA_ HIP_ ROCR_ CUDA_ CUBLAS CUDNN_ GPU_ AMD_ HIPBLASLT_ ROCBLAS_ "
    "MIOPEN_ AITER_ CK_ NVTE_ TORCH PYTORCH_ TRITON_ GLOO_ UCX_ FI_ IBV_ OMP_ KMP_ GOMP_ MKL_ NUMEXPR_ HF_ "
    "TRANSFORMERS_ TOKENIZERS_ WANDB_ MLFLOW_ KINETO_ XLA_ JAX_ TE_ TENSORBOARD_".split()
)
NAMES = frozenset(
    "NNODES NODE_RANK GPUS_PER_NODE HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy DATA_PATH "
    "TOKENIZED_DATA_PATH BACKEND_PATH USING_AINIC REBUILD_PRIMUS_TURBO GPU_ARCHS REBUILD_BNXT PATH_TO_BNXT_TAR_PACKAGE "
    "ENABLE_NUMA_BINDING SDMA_ALL_GATHER PATCH_TE_FLASH_ATTN DUMP_HLO DUMP_HLO_DIR".split()
)
"""With the families, what a run reads: facts of the launch, the libraries' and the trackers' settings (from the
existing system's documentation, and the libraries' own)."""
KEPT_OUT = frozenset(
    "CUDA_HOME CUDA_PATH CUDA_ROOT HIP_PATH HSA_PATH PRIMUS_PYTHON PRIMUS_CONTAINER_ENGINE PRIMUS_LAUNCHER "
    "PRIMUS_LAUNCHER_PID PRIMUS_PROGRESS PRIMUS_ATTEMPT SLURM_JWT SLURM_CONF".split()
)
"""Places of this machine's own software, which would hide the image's, and what has no business inside."""
HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH")
"""Of these an engine that passes on all variables must know nothing."""

CLIENTS = frozenset(
    "PATH HOME USER LOGNAME SHELL TERM TMPDIR PWD OLDPWD IFS ENV BASH_ENV REGISTRY_AUTH_FILE STORAGE_DRIVER "
    "STORAGE_OPTS BUILDAH_ISOLATION PYTHONPATH PYTHONHOME GODEBUG GOGC GOMAXPROCS GOMEMLIMIT GOTRACEBACK "
    "NOTIFY_SOCKET".split()
)
CLIENTS_FAMILIES = tuple("LD_ DOCKER_ CONTAINER _CONTAINER PODMAN_ APPTAINER SINGULARITY XDG_ SSL_CERT_ DBUS_".split())
"""The environment of the engines' clients, and of the libraries they are built with (their manuals)."""


def passed_on(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the variables that a run needs of those that are set."""
    return tuple(sorted(name for name in environ if _is_passed_on(name)))


def _is_passed_on(name: str) -> bool:
    is_wanted = name in NAMES or name.startswith(FAMILIES)
    return is_wanted and name not in KEPT_OUT and re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) is not None


def changes_client(name: str) -> bool:
    """Whether the engine's client reads the variable itself."""
    return name in CLIENTS or name.startswith(CLIENTS_FAMILIES)
