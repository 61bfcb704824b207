"""Lists the named datasets."""

from __future__ import annotations

from primus import registry


def list_named_datasets() -> tuple[dict[str, str], str]:
    """The summary of each named dataset, by name, and the same as a human-readable table."""
    found = {name: registry.read_summary("sources", name) for name in registry.list_plug_ins("sources")}
    width = max(map(len, found), default=0)
    return found, "\n".join(f"{name:{width}}  {summary}" for name, summary in found.items())
