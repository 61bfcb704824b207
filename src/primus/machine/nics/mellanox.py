"""Mellanox (NVIDIA) ConnectX, whose RDMA devices are usually called mlx5_N."""

from primus.machine.profile import Nic, Setting

NIC = Nic(
    kind="mellanox",
    title="NVIDIA ConnectX",
    vendor_ids=(0x15B3,),
    name_prefixes=("mlx5_",),
    link_layer="InfiniBand",
    settings={
        "NCCL_IB_GID_INDEX": Setting(
            value=None,
            reason="none is used on InfiniBand; on RoCE it is read from the port's table",
            source="NCCL user guide",
        ),
    },
)
