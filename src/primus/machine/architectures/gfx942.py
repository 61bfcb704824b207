"""CDNA 3."""

from primus.machine.profile import ProfileLayer, Setting

DOCUMENTS = "AMD-AGI/Primus docs, end-to-end-training-recipes.md, megatron-lm-training.md"

LAYER = ProfileLayer(
    name="gfx942",
    parent="amd",
    settings={
        "NVTE_CK_IS_V3_ATOMIC_FP32": Setting(
            value="1",
            reason="else Transformer Engine's attention gradient overflows at the first step",
            source=DOCUMENTS,
            when="transformer engine",
        ),
        "PRIMUS_TURBO_ATTN_V3_ATOMIC_FP32": Setting(
            value="1",
            reason="Primus-Turbo's attention gradient sums with fp32 atomics",
            source=DOCUMENTS,
            when="primus turbo",
        ),
    },
)
