"""AMD Pensando AI NICs (Pollara 400), whose RDMA devices are called ionic_N."""

from primus.machine.profile import Nic, Setting

LAUNCHER = "AMD-AGI/Primus AINIC hook"

NIC = Nic(
    kind="ainic",
    title="AMD Pensando Pollara",
    vendor_ids=(0x1DD8,),
    name_prefixes=("ionic",),
    settings={
        "NCCL_IB_GID_INDEX": Setting(value="1", reason="where these adapters have RoCE v2 with IPv4", source=LAUNCHER),
        "NCCL_IB_TC": Setting(value="104", reason="traffic class of the lossless queue, DSCP 26", source=LAUNCHER),
        "NCCL_IB_FIFO_TC": Setting(value="192", reason="traffic class of control messages, DSCP 48", source=LAUNCHER),
        "NCCL_IB_SL": Setting(value="0", reason="service level; the traffic class decides", source=LAUNCHER),
        "NCCL_IB_ROCE_VERSION_NUM": Setting(value="2", reason="RoCE v2", source=LAUNCHER),
        "NCCL_IB_QPS_PER_CONNECTION": Setting(
            value="1", reason="one queue pair; the adapter spreads packets over paths itself", source=LAUNCHER
        ),
        "NCCL_IB_USE_INLINE": Setting(value="1", reason="small messages travel in the request", source=LAUNCHER),
        "NCCL_MAX_P2P_CHANNELS": Setting(value="56", reason="channels of send and receive", source=LAUNCHER),
        "NET_OPTIONAL_RECV_COMPLETION": Setting(
            value="1", reason="no completion is awaited where none is needed", source=LAUNCHER
        ),
        "NCCL_GDR_FLUSH_DISABLE": Setting(value="1", reason="no flush after each receive", source=LAUNCHER),
        "RCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING": Setting(
            value="0", reason="relaxed ordering of writes to GPU memory", source=LAUNCHER
        ),
        "NCCL_DMABUF_ENABLE": Setting(
            value="0", reason="GPU memory is registered by the peer memory module", source=LAUNCHER
        ),
        "NCCL_IGNORE_CPU_AFFINITY": Setting(value="1", reason="threads go where the adapter is", source=LAUNCHER),
        "NCCL_PXN_DISABLE": Setting(
            value="0", reason="send over the NIC of a neighbour on the same rail", source=LAUNCHER
        ),
        "RCCL_AINIC_ROCE": Setting(
            value="1", reason="RCCL's own support of these adapters", source=LAUNCHER, when="rocm 7.2.1"
        ),
        "NCCL_NET_PLUGIN": Setting(
            value="none",
            reason="the plug-in for these adapters is part of RCCL from ROCm 7.2.1 on, and a library before",
            source=LAUNCHER,
            when="rocm 7.2.1",
            alternatives={"rocm before 7.2.1": "librccl-anp.so"},
        ),
    },
)
