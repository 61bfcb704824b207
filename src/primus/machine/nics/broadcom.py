"""Broadcom NetXtreme-E (BCM57508, Thor 2 BCM57608), whose RDMA devices are usually called bnxt_reN."""

from primus.machine.profile import Nic, Setting

LAUNCHER = "AMD-AGI/Primus Broadcom settings"

NIC = Nic(
    kind="broadcom",
    title="Broadcom Thor",
    vendor_ids=(0x14E4,),
    name_prefixes=("bnxt_re",),
    settings={
        "NCCL_IB_GID_INDEX": Setting(
            value="3", reason="usual index of RoCE v2 with IPv4, where the port's table says nothing", source=LAUNCHER
        ),
        "NCCL_CROSS_NIC": Setting(value="1", reason="rings may use several NICs", source=LAUNCHER),
        "NCCL_PXN_DISABLE": Setting(
            value="0", reason="send over the NIC of a neighbour on the same rail", source=LAUNCHER
        ),
    },
)
