from __future__ import annotations

import errno
import json
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus.data.encode.job import EncodeJob, prepare_token_files
from primus.data.megatron import fingerprint
from primus.data.megatron.fingerprint import fingerprint_prefixes
from primus.data.megatron.indexed_dataset import IndexedTokens, IndexedWriter, bin_path, idx_path
from primus.data.megatron.manifest import EncodeRecipe, TokenFileManifest, manifest_path
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.data.verify import alignment, index_checks, manifest_checks, sample_checks, token_checks
from primus.data.verify import verify as verifying
from primus.data.verify.sample_checks import TokenizerSource
from primus.data.verify.token_checks import TokenScan
from primus.data.verify.verify import VerifyReport, VerifySettings, verify_token_files
from token_file_corruptions import CORRUPTIONS

NUM_DOCUMENTS = 120


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, prose: Callable[..., str], tokenizer_file: Path) -> Path:
    """Prefix of tokens with a manifest, made from 120 documents."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = (json.dumps({"text": prose(100 + number, number)}) + "\n" for number in range(NUM_DOCUMENTS))
    (folder / "text.jsonl").write_text("".join(lines))
    job = EncodeJob(output=folder / "c", tokenizer=str(tokenizer_file), inputs=(str(folder / "text.jsonl"),))
    return prepare_token_files(job)[0].prefix


@pytest.fixture
def copied(corpus: Path, tmp_path: Path) -> Path:
    """A copy of it that may be broken."""
    return copy_of(corpus, tmp_path)


def copy_of(prefix: Path, folder: Path) -> Path:
    for file in prefix.parent.glob(f"{prefix.name}.*"):
        shutil.copy(file, folder)
    return folder / prefix.name


def check(prefix: Path, **known: object) -> VerifyReport:
    return next(verify_token_files([prefix], VerifySettings(**known)))  # type: ignore[arg-type]


def said(report: VerifyReport) -> str:
    return "\n".join(f"{finding.check}: {finding}" for finding in report.findings)


def without_manifest(prefix: Path) -> Path:
    manifest_path(prefix).unlink()
    for file in prefix.parent.glob("*.tokenizer.json"):
        file.unlink()
    return prefix


def test_good_files_are_good(corpus: Path) -> None:
    report = check(corpus, samples=3)
    assert report.findings == []
    assert (report.documents, report.sequences, report.tokens) == (120, 120, IndexedTokens(corpus).num_tokens)
    assert report.fingerprint == fingerprint_prefixes([corpus])
    assert [sample.same for sample in report.samples] == [True] * 3
    assert "16 of 16 decoded documents give the same tokens again" in report.notes


def test_good_files_without_a_manifest_are_good_as_far_as_one_can_tell(copied: Path) -> None:
    report = check(without_manifest(copied), vocab_size=300)
    assert report.findings == []
    assert any("a token replaced by another" in note for note in report.notes)
    assert any("token 0 is assumed to be the end-of-document token" in note for note in report.notes)


FOUND_AT = {
    "bin truncated": r"size: .*c_text_document\.bin: .* \(byte [\d,]+\)",
    "bin of odd bytes": r"size: .*\.bin: .*not a multiple of the token size, 2 bytes \(byte [\d,]+\)",
    "bin empty": r"size: .*\.bin: 0 bytes, but",
    "bin with trailing garbage": r"size: .*\.bin: .*the last sequence of the index ends at",
    "zero hole in bin": r"zeros: .*\.bin: runs of zeros.*\(byte 10,240, document \d+\)",
    "bit flip": r"checksum: .*\.bin: tokens have changed since they were written.* \(byte 0, document 0\)",
    "byte-swapped": r"tokens: .*\.bin: tokens outside the vocabulary of 300 \(byte \d.*more\)",
    "token beyond the vocabulary": r"tokens: .*\.bin: tokens outside .* of 300 \(byte 2,468, document \d+\)",
    "end of document missing": r"ends: .*\.bin: documents that do not end with token 0 \(byte [\d,]+, document 20\)",
    "one length changed": r"lengths: .*\.idx: lengths that contradict the next pointer \(byte 102, sequence 17\)",
    "one length 0": r"lengths: .*\.idx: lengths that contradict the next pointer \(byte 102, sequence 17\)",
    "one length negative": r"lengths: .*\.idx: negative lengths \(byte 102, sequence 17\)",
    "lengths of another run": r"pointers: .*\.idx: pointers .* the previous sequence \(byte 5.*more\)",
    "type code 8 becomes 3": r"header: .*\.idx: tokens of type int16, but uint16 in the manifest \(byte 17\)",
    "type code 8 becomes 4": r"header: .*\.idx: tokens of type int32, but uint16 in the manifest \(byte 17\)",
    "documents not in order": r"documents: .*\.idx: .*not begin after the previous one \(byte 1,546, document 9\)",
    "pointer out of range": r"pointers: .*\.idx: .*end of the previous sequence \(byte 586, sequence 9\)",
    "pointer negative": r"pointers: .*\.idx: .*end of the previous sequence \(byte 586, sequence 9\)",
    "idx truncated": r"size: .*\.idx: 2,422 bytes; 120 sequences .* need 2,442 \(byte 2,422\)",
    "wrong number of sequences": r"size: .*\.idx: 2,442 bytes; 121 sequences .* need 2,454",
    "wrong number of documents": r"size: .*\.idx: 2,442 bytes; 120 sequences and 120 document boundaries need 2,434",
    "another version": r"header: .*\.idx: format version 2; expected 1 \(byte 9\)",
    "another magic": r"header: .*\.idx: does not begin with the magic bytes of a Megatron index \(byte 0\)",
}


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("block", [3, index_checks.BLOCK])
def test_every_corruption_is_found_and_located(
    copied: Path, name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_checks, "BLOCK", block)
    CORRUPTIONS[name](copied, 0)
    assert re.search(FOUND_AT[name], said(check(copied)))


NEED_A_MANIFEST = {"bit flip", "type code 8 becomes 3"}
"""Nothing but a manifest, or ids above 32,767, tells these from good files."""


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - NEED_A_MANIFEST))
def test_without_a_manifest_all_is_found_that_contradicts_itself(copied: Path, name: str) -> None:
    CORRUPTIONS[name](without_manifest(copied), 0)
    assert check(copied, vocab_size=300).findings


def test_all_that_is_wrong_is_said_at_once(copied: Path) -> None:
    for name in ("token beyond the vocabulary", "end of document missing", "another version"):
        CORRUPTIONS[name](copied, 0)
    (copied.parent / f"{copied.name}.tokenizer.json").unlink()
    assert [finding.check for finding in check(copied).findings] == [
        "header",
        "tokenizer",
        "tokens",
        "ends",
        "checksum",
        "checksum",
    ]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_found(tmp_path_factory: pytest.TempPathFactory, corpus: Path, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("byte")
    prefix = copy_of(corpus, folder)
    path = data.draw(st.sampled_from([bin_path(prefix), idx_path(prefix), manifest_path(prefix)]))
    content = bytearray(path.read_bytes())
    place, change = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(1, 255))
    content[place] ^= change
    path.write_bytes(content)
    is_told = path != manifest_path(prefix) or is_read(bytes(content), corpus)
    assert bool(check(prefix).findings) or not is_told
    shutil.rmtree(folder)


def is_read(content: bytes, corpus: Path) -> bool:
    """Whether a manifest is damaged or says something else of the files.

    Names and origins are free text, and the checksum of the whole .bin is only used where there is no fingerprint.
    """
    import msgspec

    try:
        changed = msgspec.json.decode(content, type=TokenFileManifest)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return True
    before = msgspec.json.decode(manifest_path(corpus).read_bytes(), type=TokenFileManifest)
    changed = msgspec.structs.replace(changed, bin=msgspec.structs.replace(changed.bin, xxh3=before.bin.xxh3))
    names = ("documents", "sequences", "tokens", "max_token_id", "dtype", "bin", "idx", "fingerprint", "pieces")
    return any(getattr(changed, name) != getattr(before, name) for name in names)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_changed_length_or_pointer_is_found_without_a_manifest(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("byte")
    prefix = without_manifest(copy_of(corpus, folder))
    content = bytearray(idx_path(prefix).read_bytes())
    content[data.draw(st.integers(18, 34 + 12 * NUM_DOCUMENTS - 1))] ^= data.draw(st.integers(1, 255))
    idx_path(prefix).write_bytes(content)
    assert check(prefix).findings
    shutil.rmtree(folder)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 512 tokens, so that small files have many."""
    for module in (fingerprint, verifying, manifest_checks):
        monkeypatch.setattr(module, "CHUNK_TOKENS", 512)
    for module in (fingerprint, index_checks):
        monkeypatch.setattr(module, "CHUNK_DOCUMENTS", 8)
    monkeypatch.setattr(fingerprint, "MAX_PIECES", 16)
    monkeypatch.setattr(token_checks, "RANGE_CHUNKS", 4)


def write(prefix: Path, dtype: str, seed: int = 0) -> tuple[Path, list[list[int]]]:
    """Documents that end with token 255, without a manifest."""
    random_ids = random.Random(seed)
    documents = [[random_ids.randrange(1, 255) for _ in range(random_ids.randrange(200))] for _ in range(90)]
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(np.array([*document, 255]))
        writer.commit()
    return prefix, documents


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_chunks_and_ranges_see_every_document_of_every_type(tmp_path: Path, dtype: str) -> None:
    prefix, documents = write(tmp_path / "x", dtype)
    report = check(prefix, vocab_size=256)
    assert report.findings == []
    assert (report.largest_token, report.fingerprint) == (255, fingerprint_prefixes([prefix]))
    ends = np.cumsum([len(document) + 1 for document in documents])
    tokens = np.fromfile(bin_path(prefix), dtype)
    for number in (0, 41, 89):
        tokens[ends[number] - 1] = 7
    tokens[ends[60] + 1] = 255
    tokens.tofile(bin_path(prefix))
    found, report = {}, check(prefix, vocab_size=256)
    for finding in report.findings:
        found[finding.check] = [(place.byte, place.document) for place in finding.places]
    assert found == {"ends": [((ends[number] - 1) * tokens.itemsize, number) for number in (0, 41, 89)]}
    assert "token 255 occurs 1 times within documents" in report.notes


@pytest.mark.usefixtures("small_chunks")
def test_damage_is_located_to_a_part_of_the_tokens(
    tmp_path: Path, prose: Callable[..., str], tokenizer_file: Path
) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(prose(60, number) for number in range(200)))
    job = EncodeJob(output=tmp_path / "c", tokenizer=str(tokenizer_file), inputs=(str(tmp_path / "text.txt"),))
    prefix = prepare_token_files(job)[0].prefix
    tokens = np.fromfile(bin_path(prefix), "<u2")
    place = int(np.flatnonzero(tokens[6000:] != 0)[0]) + 6000
    tokens[place] = 299 if tokens[place] != 299 else 298
    tokens.tofile(bin_path(prefix))
    (finding,) = check(prefix).findings
    size = 512 * fingerprint.count_chunks_in_piece(-(-len(tokens) // 512))
    assert size < len(tokens) / 4
    assert [each.byte for each in finding.places] == [2 * (place // size * size)]


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
def test_negative_tokens_are_found_without_knowing_the_vocabulary(tmp_path: Path, dtype: str) -> None:
    prefix, _ = write(tmp_path / "x", dtype)
    tokens = np.fromfile(bin_path(prefix), dtype)
    tokens[777] = -1
    tokens.tofile(bin_path(prefix))
    assert re.search(rf"tokens: .* \(byte {777 * tokens.itemsize:,}, document \d+\)", said(check(prefix)))


def test_several_processes_find_the_same(copied: Path, corpus: Path) -> None:
    CORRUPTIONS["token beyond the vocabulary"](copied, 0)
    prefixes = [corpus, copied, corpus]
    assert list(verify_token_files(prefixes, VerifySettings(), workers=2)) == list(
        verify_token_files(prefixes, VerifySettings())
    )


def test_the_modes_of_multimodal_data_are_tolerated(copied: Path) -> None:
    without_manifest(copied)
    idx_path(copied).write_bytes(idx_path(copied).read_bytes() + bytes([0, 1] * 60))
    report = check(copied)
    assert report.findings == []
    assert any("mode" in note for note in report.notes)


def test_documents_of_several_sequences_are_checked_where_they_end(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", np.dtype(np.uint16)) as writer:
        for number in range(30):
            writer.add_batch(np.array([1, 2, 3, 4, 9]), np.array([2, 2, 1]), np.array([False, False, True]))
            writer.add_batch(np.array([5, 9 if number != 11 else 8]), np.array([2]), np.array([True]))
        writer.commit()
    (finding,) = check(tmp_path / "x").findings
    assert (finding.check, [place.document for place in finding.places]) == ("ends", [23])
    assert check(tmp_path / "x", eod_id=-1).findings == []


def test_zeros_may_be_padding(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", np.dtype(np.uint16)) as writer:
        writer.add_document(np.zeros(10_000, dtype=np.int64))
        writer.commit()
    assert re.search(r"zeros: .*20,?\d{3} bytes|zeros: .*19,\d{3} bytes", said(check(tmp_path / "x")))
    assert check(tmp_path / "x", padding=True).findings == []


def test_a_tokenizer_that_is_not_that_of_the_data_is_found(copied: Path, prose: Callable[..., str]) -> None:
    beside = copied.parent / f"{copied.name}.tokenizer.json"
    described = json.loads(beside.read_text())
    vocab = described["model"]["vocab"]
    vocab["a"], vocab["e"] = vocab["e"], vocab["a"]
    beside.write_text(json.dumps(described))
    assert "differs from the tokenizer of the data: fingerprint" in said(check(copied))


def test_tokens_of_another_tokenizer_are_found_without_a_manifest(
    copied: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    described = json.loads(tokenizer.content)
    vocab = described["model"]["vocab"]
    described["model"]["vocab"] = {token: (place + 20) % 299 + 1 if place else 0 for token, place in vocab.items()}
    (tmp_path / "other.json").write_text(json.dumps(described))
    report = check(without_manifest(copied), tokenizer=str(tmp_path / "other.json"))
    assert re.search(r"only 0 of 16 decoded documents .* the tokens are probably not from .*other.json", said(report))


@pytest.mark.parametrize(("others", "is_wrong"), [(8, False), (9, True)])
def test_documents_that_are_encoded_otherwise_are_wrong_where_they_are_most(
    tmp_path: Path, tokenizer_file: Path, tokenizer: Tokenizer, others: int, is_wrong: bool
) -> None:
    whole, letters = tokenizer.encode("the lazy dogs"), [tokenizer.encode(letter)[0] for letter in "thelazydogs"]
    with IndexedWriter(tmp_path / "x", np.dtype(np.uint16)) as writer:
        for number in range(16):
            writer.add_document(np.array(letters if number < others else whole))
        writer.commit()
    report = check(tmp_path / "x", tokenizer=str(tokenizer_file))
    assert ("samples" in said(report)) == is_wrong
    assert is_wrong or "8 of 16 decoded documents give the same tokens again (not " in "".join(report.notes)


@pytest.mark.parametrize("name", ["fingerprint", "pieces", "bin", "idx"])
def test_a_manifest_that_has_lost_a_checksum_is_found(copied: Path, name: str) -> None:
    manifest = json.loads(manifest_path(copied).read_text())
    if name in ("bin", "idx"):
        manifest[name]["xxh3"] = ""
    else:
        manifest[name] = ""
    manifest_path(copied).write_text(json.dumps(manifest))
    assert "one of its checksums is missing" in said(check(copied))


def test_an_index_of_other_documents_is_found_by_the_manifest(copied: Path) -> None:
    content = bytearray(idx_path(copied).read_bytes())
    lengths = struct.unpack_from("<2i", content, 34)
    struct.pack_into("<2i", content, 34, lengths[0] + 1, lengths[1] - 1)
    struct.pack_into("<q", content, 34 + 4 * NUM_DOCUMENTS + 8, 2 * (lengths[0] + 1))
    idx_path(copied).write_bytes(content)
    checks = [finding.check for finding in check(copied).findings]
    assert checks == ["ends", "ends", "checksum", "checksum"]


def test_a_manifest_without_a_fingerprint_has_checksums_of_the_files(copied: Path) -> None:
    facts = json.loads(manifest_path(copied).read_text())
    manifest_path(copied).write_text(json.dumps({**facts, "fingerprint": "", "pieces": ""}))
    assert check(copied).findings == []
    CORRUPTIONS["bit flip"](copied, 0)
    assert [str(finding.check) for finding in check(copied).findings] == ["checksum"]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_whatever_is_in_the_files_is_reported_and_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("any")
    prefix = copy_of(corpus, folder)
    if data.draw(st.booleans()):
        without_manifest(prefix)
    for path in (bin_path(prefix), idx_path(prefix)):
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            place = data.draw(st.integers(0, 60) | st.integers(0, len(content) - 1))
            content[place : place + 8] = data.draw(st.binary(max_size=9))
        path.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) // 2, 0]))])
    is_same = all(path(prefix).read_bytes() == path(corpus).read_bytes() for path in (bin_path, idx_path))
    assert bool(check(prefix).findings) or is_same or not manifest_path(prefix).exists()
    shutil.rmtree(folder)


def test_the_first_id_beyond_the_vocabulary_is_outside(tmp_path: Path) -> None:
    prefix, _ = write(tmp_path / "x", "uint16")
    assert check(prefix, vocab_size=256).findings == []
    assert [finding.check for finding in check(prefix, vocab_size=255).findings] == ["tokens"]


@pytest.mark.usefixtures("small_chunks")
def test_a_hole_that_goes_through_several_parts_is_one(tmp_path: Path) -> None:
    prefix, _ = write(tmp_path / "x", "uint16")
    tokens = np.fromfile(bin_path(prefix), "<u2")
    tokens[1000:5000] = 0
    tokens.tofile(bin_path(prefix))
    (hole,) = [finding for finding in check(prefix).findings if finding.check == "zeros"]
    assert hole.count == 1 and [place.byte for place in hole.places] == [2048]


def test_zeros_that_were_written_are_no_hole(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "text.txt").write_text("<|endoftext|>" * 9000)
    job = EncodeJob(
        output=tmp_path / "c",
        tokenizer=str(tokenizer_file),
        inputs=(str(tmp_path / "text.txt"),),
        recipe=EncodeRecipe(parse_special_tokens=True),
    )
    prefix = prepare_token_files(job)[0].prefix
    assert check(prefix).findings == []
    assert {finding.check for finding in check(without_manifest(prefix)).findings} == {"zeros"}


def test_tokens_before_the_first_sequence_are_found(tmp_path: Path) -> None:
    prefix, documents = write(tmp_path / "x", "uint16")
    content = bytearray(idx_path(prefix).read_bytes())
    pointers = np.frombuffer(content, "<i8", len(documents), 34 + 4 * len(documents))
    content[34 + 4 * len(documents) : 34 + 12 * len(documents)] = (pointers + 2).tobytes()
    idx_path(prefix).write_bytes(content)
    bin_path(prefix).write_bytes(b"\x01\x00" + bin_path(prefix).read_bytes())
    assert said(check(prefix)) == f"pointers: {idx_path(prefix)}: the first pointer is 2, not 0 (byte 394, sequence 0)"


def test_a_document_without_a_sequence_is_found(tmp_path: Path) -> None:
    prefix, documents = write(tmp_path / "x", "uint16")
    content = bytearray(idx_path(prefix).read_bytes())
    struct.pack_into("<q", content, 34 + 12 * len(documents) + 8 * 7, 6)
    idx_path(prefix).write_bytes(content)
    assert re.search(
        r"documents that do not begin after the previous one \(byte [\d,]+, document 7\)", said(check(prefix))
    )


def test_sequences_before_the_first_document_are_found(tmp_path: Path) -> None:
    prefix, documents = write(tmp_path / "x", "uint16")
    content = bytearray(idx_path(prefix).read_bytes())
    place = 34 + 12 * len(documents)
    # Document 1 begins where it began, so that every document is after the one before it, and 0 is lost.
    borders = np.frombuffer(bytes(content), "<i8", len(documents) + 1, place)[1:]
    struct.pack_into("<q", content, 18 + 8, len(documents))
    content[place:] = borders.tobytes()
    idx_path(prefix).write_bytes(content)
    place_of_first = f"(byte {place:,}, document 0)"
    assert f"the first document begins at sequence 1, not 0 {place_of_first}" in said(check(prefix))


def test_a_manifest_that_says_another_largest_token_is_found(copied: Path) -> None:
    facts = json.loads(manifest_path(copied).read_text())
    manifest_path(copied).write_text(json.dumps({**facts, "max_token_id": facts["max_token_id"] + 1}))
    assert "manifest: " in said(check(copied)) and "the largest token is" in said(check(copied))


def test_no_end_is_inferred_where_documents_end_in_many_ways(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", np.dtype(np.uint16)) as writer:
        for number in range(100):
            writer.add_document(np.array([7, 8, 9 if number % 4 else number]))
        writer.commit()
    report = check(tmp_path / "x")
    assert report.findings == [] and any("documents end with different tokens" in note for note in report.notes)


def test_documents_that_are_all_empty_are_no_data(tmp_path: Path, tokenizer_file: Path) -> None:
    with IndexedWriter(tmp_path / "x", np.dtype(np.int32)) as writer:
        for _ in range(20):
            writer.add_document(np.array([], dtype=np.int64))
        writer.commit()
    assert said(check(tmp_path / "x", tokenizer=str(tokenizer_file))) == f"size: {tmp_path}/x.bin: empty"


def test_what_cannot_be_read_is_found_and_the_rest_is_checked(copied: Path, corpus: Path) -> None:
    manifest_path(copied).unlink()
    manifest_path(copied).mkdir()
    bad, good = verify_token_files([copied, corpus], VerifySettings())
    assert said(bad) == f"files: {manifest_path(copied)}: cannot be read: Is a directory"
    assert good.findings == []


def test_a_disk_that_fails_while_tokens_are_read_is_found(corpus: Path) -> None:
    def failing() -> Iterator[TokenScan]:
        raise OSError(errno.EIO, "Input/output error")
        yield

    report = verifying.finish_report(
        verifying.plan_verification(corpus, VerifySettings(), TokenizerSource()), failing()
    )
    assert said(report) == f"files: {bin_path(corpus)}: cannot be read: Input/output error"


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_folder_in_the_place_of_a_file_is_found(copied: Path, suffix: str) -> None:
    path = copied.with_name(copied.name + suffix)
    path.unlink()
    path.mkdir()
    assert f"files: {path}: a folder" in said(check(copied))


@pytest.mark.parametrize(("size", "is_found"), [(4096, True), (3072, False)])
def test_a_lost_page_is_found_wherever_it_begins(tmp_path: Path, size: int, is_found: bool) -> None:
    with IndexedWriter(tmp_path / "x", np.dtype(np.int32)) as writer:
        writer.add_document(np.full(20_000, 7))
        writer.commit()
    content = bytearray(bin_path(tmp_path / "x").read_bytes())
    content[8448 : 8448 + size] = bytes(size)
    bin_path(tmp_path / "x").write_bytes(content)
    assert ("zeros: " in said(check(tmp_path / "x"))) == is_found


@pytest.mark.parametrize("is_wrong", [False, True])
def test_long_documents_are_decoded_in_part(
    tmp_path: Path, tokenizer_file: Path, tokenizer: Tokenizer, prose: Callable[..., str], is_wrong: bool
) -> None:
    """Where a document is cut, its last tokens may come out otherwise."""
    tokens = tokenizer.encode(prose(9000))
    if is_wrong:
        tokens[3000:3000] = [tokenizer.encode(letter)[0] for letter in "thelazydogs"]
    unstable = [tokenizer.encode(letter)[0] for letter in "the"]
    tokens[4096 - len(unstable) : 4096] = unstable
    assert len(tokens) > 4096
    with IndexedWriter(tmp_path / "x", np.dtype(np.uint16)) as writer:
        writer.add_document(np.array(tokens))
        writer.commit()
    assert ("samples: " in said(check(tmp_path / "x", tokenizer=str(tokenizer_file)))) == is_wrong


def prose_tokens(vocabulary: int, count: int = 60_000) -> np.ndarray:
    """Tokens of a Zipf distribution, as those of text are; the frequency of a token is no matter of its id."""
    random = np.random.default_rng(vocabulary)
    ranks = np.arange(1, vocabulary)
    chosen = random.choice(vocabulary - 1, count, p=(1 / ranks) / (1 / ranks).sum())
    ids: np.ndarray = (1 + random.permutation(vocabulary - 1))[chosen]
    ids[99::100] = 0
    return ids


def write_shifted(prefix: Path, tokens: np.ndarray, dtype: str, shift: int, first: int = 0) -> None:
    """Token files of documents of 100 tokens whose stream has gained (or lost, where negative) bytes at a token."""
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in np.split(tokens, len(tokens) // 100):
            writer.add_document(document)
        writer.commit()
    content, place = bin_path(prefix).read_bytes(), first * np.dtype(dtype).itemsize
    moved = content[:place] + (bytes(shift) if shift > 0 else b"") + content[place + max(0, -shift) :]
    bin_path(prefix).write_bytes((moved + bytes(8))[: len(content)])


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "shift"),
    [
        *((vocabulary, "uint16", shift) for vocabulary in (200, 2000, 32_000, 50_257) for shift in (1, -1)),
        *(
            (vocabulary, "int32", shift)
            for vocabulary in (200, 32_000, 128_256, 200_000)
            for shift in (1, 2, 3, -1, -2)
        ),
    ],
)
def test_a_stream_that_is_shifted_by_bytes_is_found_without_a_manifest(
    tmp_path: Path, vocabulary: int, dtype: str, shift: int
) -> None:
    tokens = prose_tokens(vocabulary)
    write_shifted(tmp_path / "right", tokens, dtype, 0)
    assert check(tmp_path / "right").findings == []
    write_shifted(tmp_path / "wrong", tokens, dtype, shift)
    assert {finding.check for finding in check(tmp_path / "wrong").findings} & {"alignment", "tokens"}


def test_a_byte_that_is_lost_in_the_middle_is_found_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "WINDOW_TOKENS", 8192)
    write_shifted(tmp_path / "x", prose_tokens(50_257), "uint16", -1, first=30_000)
    (found,) = [finding for finding in check(tmp_path / "x").findings if finding.check == "alignment"]
    assert 2 * 20_000 < (found.places[0].byte or 0) < 2 * 34_000
    assert 3 <= found.count <= 5


@pytest.mark.parametrize("kind", ["uniform", "counting", "few", "constant"])
def test_streams_that_are_no_text_are_not_taken_for_shifted(tmp_path: Path, kind: str) -> None:
    tokens = {
        "uniform": np.random.default_rng(1).integers(0, 50_000, 50_000),
        "counting": np.arange(50_000),
        "few": np.arange(50_000) % 7 * 256,
        "constant": np.full(50_000, 256),
    }[kind]
    write_shifted(tmp_path / "x", tokens, "uint16", 0)
    assert not [finding for finding in check(tmp_path / "x").findings if finding.check == "alignment"]


def test_tokens_of_one_byte_cannot_be_shifted(tmp_path: Path) -> None:
    write_shifted(tmp_path / "x", np.random.default_rng(1).integers(0, 256, 5_000), "uint8", 0)
    assert alignment.check(tmp_path / "x", np.dtype("uint8"), 5_000) == []


def test_equal_tokenizers_beside_several_files_are_loaded_once(corpus: Path, tmp_path: Path) -> None:
    prefixes = []
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        prefixes.append(copy_of(corpus, tmp_path / name))
    sample_checks._from_content.cache_clear()
    assert [report.findings for report in verify_token_files(prefixes, VerifySettings())] == [[], [], []]
    assert sample_checks._from_content.cache_info().misses == 1
