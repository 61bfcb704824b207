"""What every AMD GPU gets."""

from primus.machine.profile import ProfileLayer, Setting

LAUNCHER = "AMD-AGI/Primus base_env.sh"

LAYER = ProfileLayer(
    name="amd",
    parent="gpu",
    settings={
        "NCCL_CHECKS_DISABLE": Setting(
            value="1", reason="no checks of arguments on each collective call", source=LAUNCHER
        ),
        "NCCL_IB_GID_INDEX": Setting(
            value="3",
            reason="usual index of RoCE v2 with IPv4, where the port's table says nothing",
            source=LAUNCHER,
            when="rdma",
        ),
        "NCCL_CROSS_NIC": Setting(value="0", reason="rings stay on one rail", source=LAUNCHER, when="rdma"),
        "NCCL_PXN_DISABLE": Setting(
            value="0",
            reason="multi-node MoE fails where sending over a neighbour's NIC is off",
            source="AMD-AGI/Primus#728",
            when="rdma",
        ),
        "NCCL_P2P_NET_CHUNKSIZE": Setting(
            value="524288", reason="larger chunks between nodes", source=LAUNCHER, when="several nodes"
        ),
        "RCCL_MSCCL_ENABLE": Setting(value="0", reason="RCCL's own algorithms, no external schedules", source=LAUNCHER),
        "RCCL_MSCCLPP_ENABLE": Setting(value="0", reason="RCCL's own kernels", source=LAUNCHER),
        "RCCL_MSCCLPP_FORCE_ENABLE": Setting(value="0", reason="RCCL's own kernels", source=LAUNCHER),
        "RCCL_MSCCLPP_THRESHOLD": Setting(
            value="1073741824", reason="bytes up to which MSCCL++ would serve, were it on", source=LAUNCHER
        ),
        "MSCCLPP_DISABLE_CHANNEL_CACHE": Setting(
            value="FALSE", reason="channels are kept, were MSCCL++ on", source=LAUNCHER
        ),
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": Setting(
            value="0", reason="memory is not registered with the communicator as it is allocated", source=LAUNCHER
        ),
        "HSA_ENABLE_SDMA": Setting(
            value="1", reason="copies go over the DMA engines, beside the compute units", source=LAUNCHER
        ),
        "HSA_NO_SCRATCH_RECLAIM": Setting(
            value="1", reason="scratch memory is kept between kernels; MoE runs are stable with it", source=LAUNCHER
        ),
        "GPU_MAX_HW_QUEUES": Setting(
            value="2", reason="one queue for computation and one for communication", source=LAUNCHER
        ),
        "NVTE_USE_CAST_TRANSPOSE_TRITON": Setting(
            value="1",
            reason="Transformer Engine's faster cast and transpose",
            source=LAUNCHER,
            when="transformer engine",
        ),
        "NVTE_USE_OPTIMIZED_HIPIFIED_CAST_TRANSPOSE": Setting(
            value="0",
            reason="the Triton kernel does it",
            source=LAUNCHER,
            when="transformer engine",
        ),
        "NVTE_ROCM_ENABLE_MXFP8": Setting(
            value="1",
            reason="Transformer Engine may use MXFP8 where the GPU has it",
            source=LAUNCHER,
            when="transformer engine",
        ),
        "NVTE_CK_USES_BWD_V3": Setting(
            value="1",
            reason="Transformer Engine's faster attention gradient",
            source=LAUNCHER,
            when="transformer engine",
        ),
        "NVTE_DEBUG": Setting(
            value="0",
            reason="Transformer Engine is quiet",
            source=LAUNCHER,
            when="transformer engine",
        ),
        "NVTE_DEBUG_LEVEL": Setting(
            value="0",
            reason="Transformer Engine is quiet",
            source=LAUNCHER,
            when="transformer engine",
        ),
        "NVTE_FUSED_ATTN_LOG_CONFIG": Setting(
            value="0",
            reason="Transformer Engine is quiet",
            source=LAUNCHER,
            when="transformer engine",
        ),
        "PRIMUS_TURBO_ATTN_V3_ATOMIC_FP32": Setting(
            value="0",
            reason="Primus-Turbo's attention gradient sums without fp32 atomics",
            source=LAUNCHER,
            when="primus turbo",
        ),
        "PRIMUS_TURBO_DEEPEP_TIMEOUT": Setting(
            value="600",
            reason="seconds that expert parallel waits for a slow peer",
            source=LAUNCHER,
            when="primus turbo",
        ),
    },
)
