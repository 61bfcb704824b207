"""The properties of a job on which environment variables depend."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class JobWorkload(Struct, frozen=True, kw_only=True):
    """The properties of a job on which environment variables depend."""

    framework: str
    """Name of the framework."""
    tensor: int = 1
    """Tensor parallel size."""
    pipeline: int = 1
    context: int = 1
    """Context parallel size."""
    expert: int = 1
    """Expert parallel size."""
    options: Mapping[str, object] = {}
    """Backend-specific settings, such as `use_torch_fsdp2`."""

    def is_on(self, *names: str) -> bool:
        """Whether any of these framework settings is on."""
        return any(bool(self.options.get(name)) for name in names)
