"""Format manifests as YAML for kubectl."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from primus.runtimes.kubernetes.pod import Manifest

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_WORDS = frozenset("y n yes no on off true false null nan inf".split())
"""Words that parsers of YAML 1.1 read as something other than text."""


class _ManifestDumper(yaml.SafeDumper):
    """Indents lists below their key, and writes no aliases."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    """A string that all YAML parsers read alike: quoted, unless it is a plain word or a plain block."""
    is_plain = bool(_PLAIN.fullmatch(value)) and value.lower() not in _WORDS
    is_block = "\n" in value and not value[0].isspace() and value.isascii() and "\t" not in value
    style = None if is_plain else "|" if is_block else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_ManifestDumper.add_representer(str, _represent_text)


def format_yaml_documents(objects: Sequence[Manifest]) -> str:
    """`objects` as YAML documents."""
    return "---\n".join(
        yaml.dump(each, Dumper=_ManifestDumper, sort_keys=False, width=1 << 30, allow_unicode=False) for each in objects
    )
