"""Check token files for damage: index, token range, document ends, checksums, manifest and tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from primus.errors import EXIT_FAILED
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.data.verify.verify import VerifyReport

SHOWN_CHARACTERS = 400


class Options(Struct, frozen=True, kw_only=True):
    """Options of `data verify`."""

    prefix: Annotated[tuple[str, ...], Meta(extra={"positional": True})]
    """Prefixes of .bin and .idx files, glob patterns, or folders."""
    tokenizer: str | None = None
    """Expected tokenizer; by default the copy next to the files."""
    vocab_size: Annotated[int, Meta(ge=1)] | None = None
    """Upper bound of the token ids; by default the tokenizer's size."""
    eod_id: Annotated[int, Meta(ge=-1)] | None = None
    """Id of the end-of-document token, -1 for none; by default from the manifest, or inferred from the documents."""
    padding: bool = False
    """Accept pages of zeros, which are padding."""
    samples: Annotated[int, Meta(ge=0, le=16)] = 0
    """Number of decoded documents to print."""
    seed: int = 0
    """Seed that selects the documents."""
    workers: Annotated[int, Meta(ge=1)] = 1
    """Number of reading processes."""


def run(options: Options, context: TaskContext) -> int:
    """Check all files and print every finding.

    Returns:
        1 if there are findings.

    Raises:
        UsageError: The files do not exist.
        PrimusError: A file changed while it was read, or the tokenizer cannot be loaded.
    """
    from primus.config import token_files
    from primus.data.megatron.indexed_dataset import bin_path
    from primus.data.shards.display import ProgressDisplay
    from primus.data.shards.workers import ShardProgress
    from primus.data.verify.verify import VerifySettings, verify_token_files

    settings = VerifySettings(
        vocab_size=options.vocab_size,
        eod_id=options.eod_id,
        tokenizer=options.tokenizer,
        padding=options.padding,
        samples=options.samples,
        seed=options.seed,
    )
    found = token_files.find_prefixes(options.prefix)
    sizes = [path.stat().st_size for path in map(bin_path, found) if path.is_file()]
    progress = ShardProgress("verifying", sum(sizes))
    with ProgressDisplay() as display:

        def show(num_bytes: int) -> None:
            progress.done_bytes += num_bytes
            display.show_progress(progress)

        reports = list(verify_token_files(found, settings, options.workers, show))
    context.result({"reports": reports, "ok": not any(report.findings for report in reports)}, _format_reports(reports))
    return EXIT_FAILED if any(report.findings for report in reports) else 0


def _format_reports(reports: list[VerifyReport]) -> str:
    blocks = [_format_report(report) for report in reports]
    if len(reports) > 1:
        corrupt = sum(bool(report.findings) for report in reports)
        blocks.append(f"{len(reports)} pairs of files, {corrupt} of them corrupt")
    return "\n".join(blocks)


def _format_report(report: VerifyReport) -> str:
    state = f"corrupt, {_format_count(len(report.findings), 'finding')}" if report.findings else "ok"
    size = (
        f"{_format_count(report.tokens, 'token')}, {_format_count(report.documents, 'document')}, "
        f"{report.bytes / 1e6:,.1f} MB"
    )
    lines = [f"{report.prefix}: {state} ({size})"]
    lines += [f"  {finding.check:<10} {finding}" for finding in report.findings]
    lines += [f"  note       {note}" for note in report.notes]
    if report.fingerprint:
        lines.append(f"  identity   {report.fingerprint}")
    for sample in report.samples:
        text = sample.text[:SHOWN_CHARACTERS].replace("\n", "\n    ")
        lines.append(f"  document {sample.document:,}, {sample.tokens:,} tokens:\n    {text}")
    return "\n".join(lines)


def _format_count(count: int, name: str) -> str:
    return f"{count:,} {name}{'s' * (count != 1)}"
