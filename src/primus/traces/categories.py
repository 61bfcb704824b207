"""What a kernel or an operator does, by its name.

Kernel names: cuBLAS and CUTLASS (gemm, xmma, nvjet), rocBLAS and hipBLASLt (Cijk_), Composable Kernel and AITER (ck_,
fmha), FlashAttention, NCCL and RCCL (nccl), torch's own kernels; operators: those of ATen.
"""

from __future__ import annotations

import re
from functools import cache

GEMM = "gemm"
ATTENTION = "attention"
NORMALIZATION = "normalization"
OPTIMIZER = "optimizer"
EMBEDDING = "embedding"
LOSS = "softmax and loss"
COPY = "copy"
ELEMENTWISE = "elementwise"
REDUCTION = "reduction"
COMMUNICATION = "communication"
AUTOGRAD = "autograd"
OTHER = "other"
CATEGORIES = (
    GEMM, ATTENTION, NORMALIZATION, LOSS, EMBEDDING, OPTIMIZER, ELEMENTWISE, REDUCTION, COPY, COMMUNICATION,
    AUTOGRAD, OTHER,
)  # fmt: skip

_WORDS: dict[str, str] = {
    AUTOGRAD: r"^autograd:: ^[^:]*Backward\d*$",
    COMMUNICATION: "nccl rccl gloo: c10d:: _c10d_functional mpi: all_?reduce all_?gather reduce_?scatter all_?to_?all",
    ATTENTION: "fmha flash attention attn sdpa scaled_dot_product paged_kv mla_",
    NORMALIZATION: "layer_?norm rms_?norm batch_?norm group_?norm norm_?kernel cuComputeGradInput GammaBeta",
    GEMM: "gemm cijk_ cutlass cublas hipblas rocblas nvjet xmma wgmma matmul splitkreduce convolution ^dot"
    " aten::_?(add|b|badd)?mm$ aten::(mv|addmv|dot|_scaled_mm|_grouped_mm|linear|mkldnn_linear|conv)",
    OPTIMIZER: "multi_tensor_apply adam fused_?(optim|sgd|lamb) lamb_stage aten::_foreach_ aten::_fused_ Optimizer",
    EMBEDDING: "embedding indexing_backward index_select gather_kernel aten::gather$",
    LOSS: "softmax nll_loss cross_?entropy logsumexp",
    COPY: "^copy memcpy memset catarray copy_kernel copy_device"
    " aten::(copy_|_to_copy|clone|contiguous|cat|fill_|zero_)",
    REDUCTION: r"reduce_kernel aten::(sum|mean|norm|max|min|amax|argmax|linalg_vector_norm)\b reduction",
    ELEMENTWISE: "elementwise vectorized triton_poi loop_fusion ^fusion"
    " aten::(add|mul|div|sub|silu|gelu|sigmoid|pow|rsqrt|sqrt|neg|exp|where)",
}
"""Parts of names by category, as regular expressions; the first category with a match counts."""
_COMPILED = [(category, re.compile("|".join(words.split()), re.IGNORECASE)) for category, words in _WORDS.items()]

_COLLECTIVES = (
    ("all-reduce", re.compile(r"all_?reduce", re.IGNORECASE)),
    ("reduce-scatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("all-gather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("all-to-all", re.compile(r"all_?to_?all", re.IGNORECASE)),
    ("send-receive", re.compile(r"send|recv", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast", re.IGNORECASE)),
    ("barrier", re.compile(r"barrier", re.IGNORECASE)),
    ("reduce", re.compile(r"reduce", re.IGNORECASE)),
)


@cache
def find_category(name: str) -> str:
    """The category of a kernel or an operator."""
    return next((category for category, pattern in _COMPILED if pattern.search(name)), OTHER)


@cache
def find_collective(name: str) -> str:
    """The collective that a communication kernel or operator performs; its own name if that is not known."""
    return next((collective for collective, pattern in _COLLECTIVES if pattern.search(name)), "other")


def is_nccl(name: str) -> bool:
    """Whether a kernel is of NCCL or RCCL, whose kernels have the same names: what TraceLens counts."""
    return "nccl" in name.lower() or "rccl" in name.lower()
