"""What `data verify` and `data fingerprint` cost, and which of 23 corruptions they find beside megatron.core.

    python benchmarks/data_verify.py --gb 1 --rounds 5

Real text (Python's standard library) is encoded with a byte-level BPE and repeated up to the size, as uint16 and as
int32. Figures are gigabytes of .bin for each CPU second of the whole command, start-up included; beside them stands
what hashing the file alone takes (xxh3_128), in turns. megatron.core opens the same broken files and reads every
document; it is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import msgspec
import numpy as np
from launch_time import COMMAND, ENVIRONMENT, HERE, REPOSITORY
from train_speed import machine

from primus.data.encode.job import EncodeJob, prepare_token_files
from primus.data.megatron.fingerprint import Fingerprint
from primus.data.megatron.indexed_dataset import IndexedTokens, IndexedWriter, bin_path, idx_path
from primus.data.megatron.manifest import FileFacts, TokenFileManifest, encode_manifest, manifest_path
from primus.data.shards.shard_queue import compute_checksum

SOURCE_BYTES = 12_000_000
HASH = (
    "import sys; from pathlib import Path; from primus.data.shards.shard_queue import compute_checksum; "
    "compute_checksum(Path(sys.argv[1]))"
)
MEGATRON = """
import json, os, sys
import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

good = IndexedDataset(sys.argv[1])
good = [np.array(good[index]) for index in range(len(good))]  # its views die with it

def state(prefix):
    try:
        found = IndexedDataset(prefix)
    except Exception as error:
        return f"error when opened ({type(error).__name__})"
    wrong = failed = 0
    for index in range(len(good)):
        try:
            tokens = found[index]
        except Exception:
            failed += 1
            continue
        wrong += not np.array_equal(tokens, good[index])
    if wrong:
        more = f", errors in {failed}" if failed else ""
        return f"silently wrong tokens in {wrong} of {len(good)} documents{more}"
    return f"error when read ({failed} documents)" if failed else "reads as before"

for prefix in sys.argv[2:]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, state(prefix).encode())
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 10000).decode()
    os.waitpid(child, 0)
    print(json.dumps(said or "the process died"), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of each .bin")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", type=Path, help="where the record goes, instead of results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = encoded_text(folder)
        record = {
            "machine": machine(os.cpu_count()),
            "rounds": options.rounds,
            "gb": options.gb,
            "gb_per_cpu_s": {dtype: speeds(small, dtype, options, folder) for dtype in ("uint16", "int32")},
            "corruptions": corruptions(small, folder),
        }
    text = json.dumps(record, indent=1)
    output = options.output or HERE / "results" / f"data_verify-{options.machine}.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(text + "\n")
    print(f"{text}\nwritten: {output}")


def encoded_text(folder: Path) -> Path:
    """Prefix of tokens of the standard library, each module a document."""
    source = folder / "source"
    source.mkdir()
    size = 0
    for number, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))):
        if {"site-packages", "test", "tests"} & set(path.parts) or size > SOURCE_BYTES:
            continue
        shutil.copy(path, source / f"{number:05d}.py")
        size += path.stat().st_size
    return prepare_token_files(EncodeJob(output=folder / "small", tokenizer="bpe:8192", inputs=(str(source),)))[
        0
    ].prefix


def speeds(small: Path, dtype: str, options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Gigabytes for each CPU second of every command, with a file of `dtype`."""
    prefix = repeated(small, dtype, options.gb, folder)
    data = (*COMMAND, "direct", "--", "data")
    commands = {
        "verify": (*data, "verify", str(prefix)),
        "fingerprint": (*data, "fingerprint", str(prefix)),
        "xxh3 of the .bin alone": (sys.executable, "-c", HASH, str(bin_path(prefix))),
    }
    size = bin_path(prefix).stat().st_size / 1e9
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            taken[name].append(size / cpu_s(command))
    bin_path(prefix).unlink()
    return {
        name: {"median": round(statistics.median(each), 2), "min": round(min(each), 2), "max": round(max(each), 2)}
        for name, each in taken.items()
    }


def repeated(small: Path, dtype: str, gb: float, folder: Path) -> Path:
    """The tokens again and again, with a manifest that is true of them."""
    tokens, prefix, feed = IndexedTokens(small), folder / dtype, Fingerprint()
    ends = np.zeros(len(tokens), dtype=np.bool_)
    ends[tokens.borders[1:] - 1] = True
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        while writer.num_tokens * writer.dtype.itemsize < gb * 1e9:
            writer.add_batch(tokens.tokens, tokens.lengths, ends)
            feed.add_sequences(tokens.tokens, tokens.lengths, ends)
        writer.commit()
    known = msgspec.json.decode(manifest_path(small).read_bytes(), type=TokenFileManifest)
    changed = msgspec.structs.replace(
        known,
        dtype=dtype,
        documents=feed.num_documents,
        sequences=writer.num_sequences,
        tokens=feed.num_tokens,
        bin=FileFacts(bytes=bin_path(prefix).stat().st_size, xxh3=compute_checksum(bin_path(prefix))),
        idx=FileFacts(bytes=idx_path(prefix).stat().st_size, xxh3=compute_checksum(idx_path(prefix))),
        fingerprint=feed.compute_fingerprint(),
        pieces=feed.compute_pieces(),
    )
    manifest_path(prefix).write_bytes(encode_manifest(changed))
    return prefix


def cpu_s(command: tuple[str, ...]) -> float:
    """CPU seconds of a whole command that finds nothing wrong."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def corruptions(small: Path, folder: Path) -> dict[str, dict[str, str]]:
    """What each program says of each corruption."""
    spec = importlib.util.spec_from_file_location("corruptions", REPOSITORY / "tests" / "token_file_corruptions.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    eod = msgspec.json.decode(manifest_path(small).read_bytes(), type=TokenFileManifest).tokenizer.eod_id
    prefixes = {}
    for number, (name, corrupt) in enumerate(module.CORRUPTIONS.items()):
        broken = folder / f"broken_{number}"
        broken.mkdir()
        for file in small.parent.glob(f"{small.name}.*"):
            shutil.copy(file, broken)
        corrupt(broken / small.name, eod)
        prefixes[name] = broken / small.name
    command = (*COMMAND, "direct", "--", "data", "verify", *map(str, prefixes.values()), "--json")
    done = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True)
    ours = [_first(report) for report in json.loads(done.stdout)["reports"]]
    theirs = _megatron(small, list(prefixes.values()))
    return {
        name: {"data verify": one, "megatron.core": other}
        for name, one, other in zip(prefixes, ours, theirs, strict=True)
    }


def _first(report: dict) -> str:
    """The first finding, and where it is."""
    if not report["findings"]:
        return "NOT FOUND"
    finding = report["findings"][0]
    place = finding["places"][0] if finding["places"] else {}
    where = [f"{name} {place[name]:,}" for name in ("byte", "document", "sequence") if place.get(name) is not None]
    return ", ".join([finding["check"], *where])


def _megatron(good: Path, broken: list[Path]) -> list[str]:
    if importlib.util.find_spec("megatron") is None:
        return ["-"] * len(broken)
    command = (sys.executable, "-c", MEGATRON, str(good), *map(str, broken))
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"megatron.core ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]


if __name__ == "__main__":
    main()
