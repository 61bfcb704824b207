"""Less output of NCCL, and loss logged each 10 steps, before every `train` task."""

from primus.hook import HookContext, Settings, hook


@hook
def quiet(context: HookContext) -> Settings:
    """One that the user has set stays."""
    return Settings(env={"NCCL_DEBUG": "WARN"}, extra={"log_interval": 10})
