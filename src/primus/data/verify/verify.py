"""Verifies token files: index, tokens, ends of documents, checksums, manifest and tokenizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from primus.data.megatron.fingerprint import CHUNK_TOKENS, combine_digests
from primus.data.megatron.indexed_dataset import bin_path
from primus.data.megatron.manifest import TokenFileManifest
from primus.data.process_pool import process_pool
from primus.data.verify import alignment, index_checks, manifest_checks, sample_checks, token_checks
from primus.data.verify.findings import (
    MAX_PLACES,
    DamagePlace,
    TokenFileFinding,
    build_finding,
    build_missing_finding,
    build_unreadable_finding,
)
from primus.data.verify.index_checks import TokenFileIndex
from primus.data.verify.sample_checks import DecodedSample
from primus.data.verify.token_checks import ScanTask, TokenScan

INFERRED_SHARE = 0.9
"""Minimum share of documents with the same last token for inferring the end-of-document token."""

INFERRED_FROM = 1000
"""Maximum documents that are read to infer it, evenly spread."""

FEWEST_DOCUMENTS = 10
"""Minimum documents for inferring the end-of-document token."""

TASKS_AHEAD = 4
"""Maximum waiting parts for each process."""


class VerifySettings(Struct, frozen=True, kw_only=True):
    """Known facts about the files in addition to their manifests, and options of the checks."""

    vocab_size: int | None = None
    """Size of the vocabulary; every token id is below it."""
    eod_id: int | None = None
    """End-of-document token; -1 for none; None to take it from the manifest, or to infer it from the documents."""
    tokenizer: str | None = None
    """Name of the expected tokenizer; see `primus.data.tokenizers.load.load_tokenizer`."""
    padding: bool = False
    """Whether zeros are padding, so that pages of zeros are not reported."""
    samples: int = 0
    """Number of decoded documents in the report; more are decoded and encoded again."""
    seed: int = 0
    """Seed for the choice of these documents."""


class VerifyReport(Struct, kw_only=True):
    """Findings and facts about one pair of token files."""

    prefix: str
    """Path without extension."""
    findings: list[TokenFileFinding] = []
    """All damage that was found."""
    notes: list[str] = []
    """Checks that were impossible, and assumptions."""
    bytes: int = 0
    """Size of the .bin."""
    dtype: str = ""
    """Type of the tokens."""
    tokens: int = 0
    """Number of tokens."""
    documents: int = 0
    """Number of documents."""
    sequences: int = 0
    """Number of sequences."""
    largest_token: int = 0
    """Largest token id that occurs."""
    fingerprint: str = ""
    """Hash of the tokens and documents; empty if the index is damaged."""
    samples: list[DecodedSample] = []
    """Decoded documents."""


class VerifyPlan(Struct, kw_only=True):
    """A pair of files with checked index, whose tokens are still to be read."""

    prefix: Path
    settings: VerifySettings
    report: VerifyReport
    readable: bool = True
    manifest: TokenFileManifest | None = None
    index: TokenFileIndex | None = None
    tasks: list[ScanTask] = []
    in_order: bool = False
    """Whether the index is valid, so that it locates each document."""
    eod: int | None = None
    sources: sample_checks.TokenizerSource = field(default_factory=sample_checks.TokenizerSource)
    """Tokenizer of the files."""


Show = Callable[[int], None]


def verify_token_files(
    prefixes: Sequence[Path], settings: VerifySettings, workers: int = 1, show: Show = lambda num_bytes: None
) -> Iterator[VerifyReport]:
    """Check pairs of token files, and yield the report of each in order.

    Args:
        prefixes: Paths without extension.
        settings: Known facts about the files, and options of the checks.
        workers: Number of processes.
        show: Receives the number of bytes that were read since the last call.

    Raises:
        PrimusError: A file changed during the check, or the tokenizer of the settings cannot be loaded.
    """
    source = sample_checks.load_asked_tokenizer(settings.tokenizer)
    plans = (plan_verification(prefix, settings, source) for prefix in prefixes)
    if workers == 1:
        for each in plans:
            yield finish_report(each, _show_progress(map(token_checks.scan_part, each.tasks), each, show))
        return
    with process_pool(workers) as pool:
        # Reports are yielded in order. The bound on waiting parts limits memory, since the index of each waiting pair
        # is open.
        waiting: deque[tuple[VerifyPlan, list[Future[TokenScan]]]] = deque()
        for each in plans:
            waiting.append((each, [pool.submit(token_checks.scan_part, task) for task in each.tasks]))
            while sum(len(futures) for _, futures in waiting) > TASKS_AHEAD * workers:
                yield _finish_first(waiting, show)
        while waiting:
            yield _finish_first(waiting, show)


def plan_verification(prefix: Path, settings: VerifySettings, source: sample_checks.TokenizerSource) -> VerifyPlan:
    """Run all checks except those of the tokens."""
    made = VerifyPlan(prefix=prefix, settings=settings, report=VerifyReport(prefix=str(prefix)))
    try:
        _check_files(made, source)
    except OSError as error:
        made.report.findings.append(build_unreadable_finding(prefix, error))
        made.tasks, made.readable = [], False
    return made


def finish_report(made: VerifyPlan, scans: Iterator[TokenScan]) -> VerifyReport:
    """Run the checks of the tokens, and complete the report."""
    try:
        if made.readable:
            _check_tokens(made, token_checks.join_scans(scans))
    except OSError as error:
        made.report.findings.append(build_unreadable_finding(bin_path(made.prefix), error))
    return made.report


def _check_files(made: VerifyPlan, source: sample_checks.TokenizerSource) -> None:
    """Check index, manifest and tokenizer, and divide the .bin into parts to scan."""
    report, path = made.report, bin_path(made.prefix)
    made.index, findings = index_checks.open_index(made.prefix)
    # An error in one file does not end the checks of the others: all findings are collected first.
    made.manifest, wrong = manifest_checks.read_and_check_manifest(made.prefix)
    made.sources, other = sample_checks.find_tokenizer_source(made.prefix, made.manifest, source)
    report.findings += [*findings, *wrong, *other]
    if not path.is_file():
        report.findings.append(build_missing_finding(path))
        return
    report.bytes = path.stat().st_size
    _check_index(made)
    if report.dtype:
        made.eod = _find_eod(made)
        width = np.dtype(report.dtype).itemsize
        report.tokens = report.bytes // width
        if report.bytes % width:
            problem = f"{report.bytes:,} bytes is not a multiple of the token size, {width} bytes"
            report.findings.append(build_finding("size", path, problem, DamagePlace(byte=report.tokens * width)))
        made.tasks = token_checks.split_tasks(
            ScanTask(
                prefix=made.prefix,
                dtype=report.dtype,
                last=report.tokens,
                limit=_find_token_limit(made),
                eod=made.eod,
                chunk=CHUNK_TOKENS,
            )
        )


def _check_tokens(made: VerifyPlan, scan: TokenScan) -> None:
    """Evaluate the scan of the tokens, and compare it with the manifest."""
    report, index = made.report, made.index if made.in_order else None
    report.largest_token = scan.largest
    if index:
        documents = index_checks.compute_documents_digest(index, report.bytes)
        report.fingerprint = combine_digests(report.tokens, report.documents, scan.digests, documents)
    _judge_tokens(made, scan)
    # `intact`: a checksum of the manifest matches, so that heuristics about the content are not needed.
    intact = False
    if made.manifest:
        found = manifest_checks.TokenFileContents(
            report.dtype, report.tokens, report.documents, report.sequences, scan, report.fingerprint
        )
        wrong, intact = manifest_checks.check(made.prefix, made.manifest, found, index)
        report.findings += wrong
    else:
        if report.dtype and not scan.outside.count:  # which says more
            report.findings += alignment.check(made.prefix, np.dtype(report.dtype), report.tokens)
        report.notes.append("no manifest: a token replaced by another valid token cannot be detected")
    _judge_zeros(made, scan, intact)
    if index and made.sources.tokenizer:
        samples, wrong, notes = sample_checks.check(index, made.manifest, made.sources, made.settings.seed)
        report.samples = samples[: made.settings.samples]
        report.findings += wrong
        report.notes += notes


def _finish_first(waiting: deque[tuple[VerifyPlan, list[Future[TokenScan]]]], show: Show) -> VerifyReport:
    made, futures = waiting.popleft()
    return finish_report(made, _show_progress((future.result() for future in futures), made, show))


def _show_progress(scans: Iterator[TokenScan], made: VerifyPlan, show: Show) -> Iterator[TokenScan]:
    for task, scan in zip(made.tasks, scans, strict=True):
        show((task.last - task.first) * np.dtype(task.dtype).itemsize)
        yield scan


def _check_index(made: VerifyPlan) -> None:
    """Check the arrays of the index with the token type of the manifest, or with that of the index without one."""
    report, index = made.report, made.index
    if made.manifest:
        report.dtype = np.dtype(made.manifest.dtype).newbyteorder("<").str
    elif index and index.dtype:
        report.dtype = index.dtype.str
    if index is None or not report.dtype:
        return
    report.sequences, report.documents = index.num_sequences, index.num_documents
    if made.manifest:
        report.findings += manifest_checks.check_dtype(made.prefix, made.manifest, index)
        # The manifest has the type that was written. A damaged type code in the index would shift all lengths.
        made.index = index = index.with_dtype(np.dtype(report.dtype))
    wrong = index_checks.check_lengths_and_pointers(index, report.bytes) + index_checks.check_borders(index)
    report.findings += wrong
    made.in_order = not wrong and report.bytes > 0
    if not report.bytes:
        report.findings.append(build_finding("size", bin_path(made.prefix), "empty"))
    if index.multimodal:
        report.notes.append("the index has a mode for each sequence (multimodal data); modes are not checked")
    if wrong:
        report.notes.append("document ends and samples were not checked because the index is damaged")


def _find_token_limit(made: VerifyPlan) -> int | None:
    # In the order of precedence: settings, manifest, tokenizer.
    known = made.sources.tokenizer.vocab_size if made.sources.tokenizer else None
    if made.manifest:
        known = made.manifest.tokenizer.vocab_size
    if made.settings.vocab_size is not None:
        known = made.settings.vocab_size
    if known is None:
        made.report.notes.append("token range not checked against a vocabulary: give --tokenizer or --vocab-size")
    return known


def _find_eod(made: VerifyPlan) -> int | None:
    """The end-of-document token: from the settings, from the manifest, or inferred; None if the index is damaged."""
    if not made.in_order or not made.index or made.settings.eod_id == -1:
        return None
    if made.settings.eod_id is not None:
        return made.settings.eod_id
    if made.manifest:
        return made.manifest.tokenizer.eod_id if made.manifest.recipe.append_eod else None
    token = _find_usual_end(made.index, made.report.bytes)
    if token is None:
        made.report.notes.append("document ends were not checked: documents end with different tokens; see --eod-id")
    else:
        made.report.notes.append(
            f"token {token} is assumed to be the end-of-document token: almost all documents end with it"
        )
    return token


def _find_usual_end(index: TokenFileIndex, num_bytes: int) -> int | None:
    """The last token of almost all documents; None if there is none."""
    if index.num_documents < FEWEST_DOCUMENTS or index.dtype is None:
        return None
    tokens = np.memmap(bin_path(index.prefix), index.dtype, "r", shape=(num_bytes // index.dtype.itemsize,))
    # Random access to the ends only; the scan of all tokens has not started.
    chosen = np.linspace(0, index.num_documents - 1, min(index.num_documents, INFERRED_FROM)).astype(np.int64)
    ends = [
        int(index.compute_document_starts(document + 1, document + 2, num_bytes)[0]) for document in chosen.tolist()
    ]
    values, counts = np.unique(tokens[np.maximum(np.array(ends) // index.dtype.itemsize - 1, 0)], return_counts=True)
    best = int(counts.argmax())
    return int(values[best]) if counts[best] >= INFERRED_SHARE * len(chosen) else None


def _judge_tokens(made: VerifyPlan, scan: TokenScan) -> None:
    """Report tokens outside the vocabulary, and missing or misplaced end-of-document tokens."""
    report, path = made.report, bin_path(made.prefix)
    if scan.outside.count:
        problem = f"tokens outside the vocabulary of {_limit_text(made)}"
        report.findings.append(
            build_finding("tokens", path, problem, *_locate_hits(made, scan.outside), count=scan.outside.count)
        )
    if scan.no_eod.count:
        problem = f"documents that do not end with token {made.eod}"
        report.findings.append(
            build_finding("ends", path, problem, *_locate_hits(made, scan.no_eod), count=scan.no_eod.count)
        )
    if not scan.stray_eod.count:
        return
    recipe = made.manifest.recipe if made.manifest else None
    if recipe is None or recipe.parse_special_tokens or recipe.add_special_tokens:
        report.notes.append(f"token {made.eod} occurs {scan.stray_eod.count:,} times within documents")
        return
    problem = f"end-of-document token {made.eod} within documents"
    report.findings.append(
        build_finding("ends", path, problem, *_locate_hits(made, scan.stray_eod), count=scan.stray_eod.count)
    )


def _limit_text(made: VerifyPlan) -> str:
    limit = made.tasks[0].limit
    return f"the type {np.dtype(made.report.dtype).name}" if limit is None else f"{limit:,}"


def _judge_zeros(made: VerifyPlan, scan: TokenScan, intact: bool) -> None:
    """Report pages of zeros, unless checksums show that the tokens are intact."""
    lost = [(first, last) for first, last in scan.zero_sectors if last - first >= token_checks.LOST_BYTES]
    # Zeros are a heuristic for pages that were never written. Matching checksums are proof that they are data.
    if not lost or intact or made.settings.padding:
        return
    width = np.dtype(made.report.dtype).itemsize
    places = _locate_hits(made, token_checks.TokenHits([first // width for first, _ in lost[:MAX_PLACES]], len(lost)))
    total = sum(last - first for first, last in lost)
    problem = f"runs of zeros, {total:,} bytes in all, probably never written (use --padding if they are data)"
    made.report.findings.append(build_finding("zeros", bin_path(made.prefix), problem, *places, count=len(lost)))


def _locate_hits(made: VerifyPlan, hits: token_checks.TokenHits) -> list[DamagePlace]:
    width = np.dtype(made.report.dtype).itemsize
    places = [DamagePlace(byte=token * width) for token in hits.first]
    if not made.in_order or not made.index:
        return places
    index, size = made.index, made.report.bytes
    return [replace(place, document=index.document_at(place.byte, size)) for place in places]
