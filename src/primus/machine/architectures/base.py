"""What every machine gets."""

from primus.machine.profile import CORES_PER_PROCESS, ProfileLayer, Setting

LAYER = ProfileLayer(
    name="base",
    settings={
        "OMP_NUM_THREADS": Setting(
            value=CORES_PER_PROCESS,
            reason="the cores shared out among the processes of a node; torchrun would give each a single thread",
            source="PyTorch torchrun",
            when="several processes",
        ),
    },
)
