"""HPE Slingshot 11 (Cassini): devices cxiN with interfaces hsnN, reached by libfabric and not by verbs."""

from primus.machine.profile import Nic, Setting

HPE = "HPE Slingshot host software documentation, RCCL and NCCL"
CENTRES = "CSCS, Isambard and OLCF user documentation, NCCL and RCCL"

NIC = Nic(
    kind="slingshot",
    title="HPE Slingshot",
    vendor_ids=(0x17DB,),
    name_prefixes=("cxi",),
    link_layer="Slingshot",
    is_verbs=False,
    plugins=("librccl-net.so", "libnccl-net.so", "librccl-net-ofi.so", "libnccl-net-ofi.so"),
    settings={
        "NCCL_IB_GID_INDEX": Setting(value=None, reason="no verbs, no GIDs", source=HPE),
        "NCCL_CROSS_NIC": Setting(value="1", reason="rings may use several NICs", source=CENTRES),
        "NCCL_NET_GDR_LEVEL": Setting(
            value="PHB", reason="GPU memory is sent directly where GPU and NIC share a host bridge", source=CENTRES
        ),
        "FI_MR_CACHE_MONITOR": Setting(
            value="userfaultfd", reason="the other monitors can deadlock with NCCL and RCCL", source=HPE
        ),
        "FI_CXI_DISABLE_HOST_REGISTER": Setting(
            value="1", reason="registering host memory with the GPU can deadlock", source=HPE
        ),
        "FI_CXI_DEFAULT_CQ_SIZE": Setting(
            value="131072", reason="completions of many channels fit into the queue", source=HPE
        ),
    },
)
