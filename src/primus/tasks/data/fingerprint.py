"""Print the fingerprint of the tokens and documents in token files, for any division into files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from primus.errors import EXIT_FAILED, UsageError
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `data fingerprint`."""

    prefix: Annotated[tuple[str, ...], Meta(extra={"positional": True})]
    """Prefixes of .bin and .idx files in the order of the stream, glob patterns, or folders."""
    quick: bool = False
    """Print the fingerprints in the manifests; do not read the tokens."""
    workers: Annotated[int, Meta(ge=1)] = 1
    """Number of reading processes."""


class FingerprintComparison(Struct, kw_only=True):
    """The identity of one pair of files."""

    prefix: str
    """Path without extension."""
    fingerprint: str
    """From the tokens, or with --quick from the manifest."""
    manifest: str | None
    """Value in the manifest; null without a manifest."""
    same: bool | None
    """Whether both are equal; null if they were not compared."""


def run(options: Options, context: TaskContext) -> int:
    """Print the fingerprint of each pair of files, and of several also that of all as one stream.

    Returns:
        1 if tokens differ from their manifest.

    Raises:
        UsageError: The files do not exist, or --quick finds no manifest.
    """
    from primus.config import token_files
    from primus.data.megatron import fingerprint

    found = token_files.find_prefixes(options.prefix)
    files = [_compute_identity(prefix, options) for prefix in found]
    together = (
        fingerprint.fingerprint_prefixes(found, options.workers) if len(found) > 1 and not options.quick else None
    )
    value = {"fingerprint": together or (files[0].fingerprint if len(files) == 1 else None), "files": files}
    lines = [f"{each.fingerprint}  {each.prefix}{_format_comparison(each)}" for each in files]
    if together:
        lines.append(f"{together}  all of them in this order")
    context.result(value, "\n".join(lines))
    return EXIT_FAILED if any(each.same is False for each in files) else 0


def _compute_identity(prefix: Path, options: Options) -> FingerprintComparison:
    from primus.data.megatron import fingerprint, manifest

    facts = manifest.read_manifest(prefix)
    written = (facts.fingerprint or None) if facts else None
    if not options.quick:
        read = fingerprint.fingerprint_prefixes([prefix], options.workers)
        return FingerprintComparison(
            prefix=str(prefix), fingerprint=read, manifest=written, same=None if written is None else read == written
        )
    if written is None:
        raise UsageError(f"{prefix}: no manifest with a fingerprint", "remove --quick to read the tokens")
    return FingerprintComparison(prefix=str(prefix), fingerprint=written, manifest=written, same=None)


def _format_comparison(identity: FingerprintComparison) -> str:
    if identity.same is None:
        return ""
    return " (as in its manifest)" if identity.same else f" (NOT {identity.manifest}, which its manifest has)"
