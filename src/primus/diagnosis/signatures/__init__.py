"""All known signatures, by subject."""

from __future__ import annotations

from primus.diagnosis.signature import Signature
from primus.diagnosis.signatures import (
    cluster,
    communication,
    exit_codes,
    gpu,
    host,
    kernel,
    launching,
    software,
    training,
    xid,
)

SIGNATURES: tuple[Signature, ...] = (
    *gpu.SIGNATURES,
    *host.SIGNATURES,
    *communication.SIGNATURES,
    *launching.SIGNATURES,
    *software.SIGNATURES,
    *training.SIGNATURES,
    *cluster.SIGNATURES,
    *kernel.SIGNATURES,
    *xid.SIGNATURES,
    *exit_codes.SIGNATURES,
)

BY_NAME = {signature.name: signature for signature in SIGNATURES}

BY_EXIT_CODE = {code: signature for signature in SIGNATURES for code in signature.exit_codes}

ADVICE = (
    "might be asynchronously reported",
    "For debugging consider passing",
    "Compile with TORCH_USE_",
    "Device-side assertion tracking was not enabled by user",
)
"""Words of lines that only advise: they follow many kinds of errors (CUDA's, and the HIP and AMD twins)."""
