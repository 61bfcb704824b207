"""Data encoded by many machines at once: steps and arrays of a real Slurm share the shards, and give the same bytes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fakes import cli

pytestmark = [pytest.mark.cluster("slurm"), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("slurm.sh")
CORPUS_BYTES = 24 << 20
"""Six shards of the smallest size."""
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "seven", "wizards", "make", "toxic")


class Site:
    """A Slurm of three nodes, and a folder with a corpus that all of them see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "slurm"
        self.state.mkdir()
        tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"SLURM_CONF": str(self.state / "slurm.conf"), "XDG_STATE_HOME": str(folder / "state"), "PATH": tools}
        self.environ = os.environ | own | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
        chosen = random.Random(0)
        line = json.dumps({"text": " ".join(chosen.choices(WORDS, k=2000))}) + "\n"
        with (folder / "corpus.jsonl").open("w") as file:
            for number in range(CORPUS_BYTES // len(line)):
                file.write(line.replace("wizards", f"wizards{number}", 1))

    def script(self, *words: str) -> None:
        subprocess.run(["bash", str(SCRIPT), words[0], str(self.state), *words[1:]], check=True, timeout=120)

    def primus(self, *words: str, code: int = 0, limit_s: float = 150) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "primus.cli.main", *words],
            cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=limit_s,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr + self.logs()
        return done

    def encode(self, output: str, *words: str) -> tuple[str, ...]:
        """The words of the task: the slower of two ways to the same tokens, so that there is a middle to die in."""
        given = ("--input", "corpus.jsonl", "--tokenizer", "bpe.json", "--append-eod", "--workers", "1", "--no-fast")
        return ("--", "data", "encode", *given, "--output", output, *words)

    def tokens(self, output: str) -> tuple[bytes, bytes]:
        """What the files of an output hold."""
        assert not list(self.folder.glob(f".{output}.*")), "nothing is left of the work"
        prefix = self.folder / f"{output}_text_document"
        return prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()

    def submit(self, output: str, indices: str) -> str:
        """Number of an array that encodes."""
        words = ("--json", "slurm", "sbatch", "--array", indices, "-c", "2", *self.encode(output))
        number: str = json.loads(self.primus(*words).stdout)["id"]
        return number

    def encoders(self, output: str, num_jobs: int) -> list[psutil.Process]:
        """The processes that encode in this many jobs of an array, once a shard is done, without those they started."""
        found: list[psutil.Process] = []

        def are_in_the_middle() -> bool:
            inner = [each for each in psutil.process_iter() if _is_encoder(each)]
            with contextlib.suppress(psutil.NoSuchProcess):  # one has ended: the next look finds those that are left
                found[:] = [each for each in inner if each.parent() not in inner]
            return len(found) == num_jobs and any(self.folder.glob(f".{output}.work/*/*.json"))

        cli.wait_for(are_in_the_middle, "the middle of the work", timeout_s=90)
        return found

    def logs(self) -> str:
        files = [*self.folder.glob("output/*/2*/logs/slurm-*.out"), self.state / "slurmctld.log"]
        return "".join(f"\n== {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files if file.exists())


def _is_encoder(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
        is_python = bool(words) and "python" in Path(words[0]).name
        is_supervisor = "run-step" in words  # its arguments contain the encoder's
        return is_python and "encode" in words and not is_supervisor and "SLURM_ARRAY_TASK_ID" in process.environ()
    except psutil.Error:
        return False


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from primus.data.tokenizers.trained import train_byte_level_bpe

    place = Site(tmp_path_factory.mktemp("site"))
    (place.folder / "bpe.json").write_bytes(train_byte_level_bpe([" ".join(WORDS) + " "] * 50, 300).content)
    try:
        place.script("up", "3")
        yield place
    finally:
        place.script("down")


@pytest.fixture(scope="module")
def expected(site: Site) -> tuple[bytes, bytes]:
    """The files that one process makes by itself."""
    site.primus("direct", *site.encode("alone"))
    return site.tokens("alone")


def test_the_nodes_of_a_step_share_the_work(site: Site, expected: tuple[bytes, bytes]) -> None:
    done = site.primus("slurm", "srun", "-N", "2", "-c", "2", *site.encode("together"))
    assert done.stdout.count("--train_data_path") == 2, "each node says where the files are"
    assert site.tokens("together") == expected


def test_an_array_one_of_whose_jobs_is_killed_does_the_whole_work(site: Site, expected: tuple[bytes, bytes]) -> None:
    job = site.submit("array", "0-2")
    site.encoders("array", 3)[1].kill()
    assert "failed (array: 1 failed, 2 done" in site.primus("direct", "--", "jobs", "wait", job, code=137).stdout
    assert site.tokens("array") == expected
    assert len(list(site.folder.glob(f"output/data-encode/2*/logs/slurm-{job}_*.out"))) == 3
    assert site.primus("direct", *site.encode("array")).stderr.count("nothing to do") == 1


def test_an_array_all_of_whose_jobs_were_killed_goes_on_where_it_was(site: Site, expected: tuple[bytes, bytes]) -> None:
    job = site.submit("resumed", "1-2")
    for encoder in site.encoders("resumed", 2):
        encoder.kill()
    assert "failed (array: 2 failed" in site.primus("direct", "--", "jobs", "wait", job, code=137).stdout
    assert list(site.folder.glob(".resumed.work/*/*.json")), "what is done stays"
    assert not (site.folder / "resumed_text_document.bin").exists()
    site.primus("direct", "--", "jobs", "wait", site.submit("resumed", "1-2"))
    assert site.tokens("resumed") == expected
