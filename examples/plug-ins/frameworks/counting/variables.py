"""Variables of the framework `counting`."""

from primus.machine.profile import Library, Profile, Setting
from primus.machine.workload import JobWorkload

LIBRARIES: tuple[Library, ...] = ()


def list_settings(workload: JobWorkload, device: Profile | None) -> dict[str, Setting]:
    """One setting, whatever the layout of the job."""
    return {"COUNTING_BASE": Setting(value="10", reason="counts in decimal", source="examples/plug-ins")}
