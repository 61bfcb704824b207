"""The settings in force of a run of Megatron-Bridge: those of Megatron, and the adapters that its model has."""

from __future__ import annotations

from torch import nn

from primus.frameworks.megatron_bridge.settings import BridgeSettings
from primus.session.settings.settings_in_force import LiveSetting
from primus.session.settings.torch_settings import find_module_kind


def add_adapter_settings(live: list[LiveSetting], model: nn.Module) -> list[LiveSetting]:
    """The settings that Megatron's objects have, with the kind of the adapters of `model`."""
    kinds = [
        type(module).__name__
        for path, module in model.named_modules()
        if find_module_kind(path.rpartition(".")[2]) == "adapter"
    ]
    value = "dora" if any("DoRA" in kind for kind in kinds) else "lora" if kinds else "none"
    others = [each for each in live if each.key not in BridgeSettings.__struct_fields__]
    return [*others, LiveSetting(key="peft", value=value, reason="as its module is named" if kinds else "")]
