"""Tab completes runtimes, tasks, options, their values and names of runs; in the shells themselves, too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from primus import registry
from primus.cli.completion import SCRIPTS, list_candidates
from primus.cli.main import main
from primus.config.flags import list_flags
from primus.runs.store import Run, RunMetadata, create_run, create_run_id
from primus.runtime import RUNTIMES


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[[str], Run]:
    """Makes runs of an experiment in the workspace `output`."""

    def make(experiment: str) -> Run:
        identity = create_run_id()
        metadata = RunMetadata(id=identity, name=experiment, task="train pretrain", created=0.0)
        return create_run(tmp_path / "output" / experiment / identity, metadata)

    return make


def complete(line: str) -> list[str]:
    """Candidates at the end of a command line, whose last word may be empty."""
    return list_candidates(line.split(" ")[1:])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("primus-cli di", ["diagnose", "direct"]),
        ("primus-cli --js", ["--json"]),
        ("primus-cli --json slu", ["slurm"]),
        ("primus-cli slurm sb", ["sbatch"]),
        ("primus-cli slurm sbatch --max-re", ["--max-restarts"]),
        ("primus-cli slurm sbatch -- cont", ["container"]),
        ("primus-cli direct -- chec", ["checkpoint"]),
        ("primus-cli direct -- checkpoint ", ["average", "convert", "diff", "show", "verify"]),
        ("primus-cli direct -- data dedup --method ", ["exact", "minhash"]),
        ("primus-cli direct -- data dedup --meth", ["--method"]),
        ("primus-cli direct -- train pretrain --config f.yaml --train_it", ["--train_iters"]),
        ("primus-cli direct -- train pretrain --config ", []),  # a file
        ("primus-cli direct -- train pretrain --config f.yaml --lr_decay_style co", ["constant", "cosine"]),
        ("primus-cli direct -- train pretrain --config f.yaml --compile ", ["auto", "false", "true"]),
        ("primus-cli direct -- train pretrain --config f.yaml --framework hug", ["huggingface"]),
        (
            "primus-cli direct -- config check --config f.yaml --model llama3.1_4",
            ["llama3.1_405B", "llama3.1_405B-fp8"],
        ),
        ("primus-cli direct -- train pretrain --config f.yaml --lr ", []),
        ("primus-cli direct -- benchmark gemm --dur", ["--duration"]),
        ("primus-cli direct -- diagnose --kern", ["--kernel-log"]),
        ("primus-cli nonsense -- tr", ["train"]),
        ("primus-cli direct -- nonsense --x", []),
    ],
)
def test_what_may_follow(line: str, found: list[str]) -> None:
    assert complete(line) == found


def test_every_option_of_every_runtime_is_completed() -> None:
    for name in registry.list_plug_ins("runtimes"):
        found = complete(f"primus-cli {name} ")
        for flag in list_flags(registry.load_plug_in(RUNTIMES, name).Options):
            assert flag.is_positional or set(flag.names) & set(found), flag.field


def test_words_are_printed_for_the_script_and_commands_only_as_the_first_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["completion", "words", "direct", "--", "config", "ch"]) == 0
    assert capsys.readouterr().out == "check\n"
    assert "logs" in complete("primus-cli kubernetes ")
    assert "logs" not in complete("primus-cli kubernetes --follow ")


def test_the_names_of_runs_are_completed_wherever_a_run_is_read(
    make_run: Callable[[str], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("sweep")
    other = make_run("sweep")
    both = sorted([run.id, other.id])
    monkeypatch.chdir(tmp_path)
    assert complete("primus-cli direct -- diagnose swe") == ["sweep"]
    assert complete("primus-cli direct -- runs compare sweep 2") == both, "the second value is a run as well"
    assert complete("primus-cli direct -- runs compare --workspace output sweep 2") == both
    assert complete("primus-cli direct -- runs compare sweep sweep s") == [], "it takes two"
    assert complete("primus-cli direct -- runs gate sweep --baseline s") == ["sweep"]
    assert complete("primus-cli direct -- jobs logs s") == ["sweep"]
    assert complete("primus-cli direct -- diagnose a.log sw") == ["sweep"], "it takes any number"
    monkeypatch.chdir("/")
    assert complete(f"primus-cli direct -- report --workspace {tmp_path}/output sw") == ["sweep"]
    assert complete("primus-cli direct -- report sw") == []


def test_an_unknown_shell_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "bash" in capsys.readouterr().err


SHELLS = {
    "bash": """
        eval "$(primus-cli completion bash)"
        complete -p primus-cli
        complete_line() {
            read -ra COMP_WORDS <<< "$1"
            [[ "$1" == *" " ]] && COMP_WORDS+=("")
            COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
            _primus_cli
            echo "${COMPREPLY[*]}"
        }""",
    "zsh": """
        compdef() { print -- $@ }
        compadd() { print -- "${(@P)argv[2]}" }
        _files() { print -l -- ${words[CURRENT]}* }
        eval "$(primus-cli completion zsh)"
        complete_line() {
            words=(${=1}); [[ $1 == *" " ]] && words+=("")
            CURRENT=$#words
            _primus_cli
        }""",
    "fish": """
        primus-cli completion fish | source
        complete primus-cli
        function complete_line
            string join " " (complete --do-complete=$argv[1])
        end""",
}
"""Programs that load the script, print how it is registered, and define `complete_line LINE`."""


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param(shell, marks=pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed"))
        for shell in SHELLS
    ],
)
def test_a_shell_completes_command_lines(shell: str, make_run: Callable[[str], Run], tmp_path: Path) -> None:
    assert set(SHELLS) == set(SCRIPTS)
    run = make_run("tiny-llama")
    lines = {
        "primus-cli --json slurm sb": "sbatch",
        "primus-cli direct -- config ch": "check",
        "primus-cli direct -- data dedup --method ": "exact minhash",
        "primus-cli direct -- runs show tiny": "tiny-llama",
        f"primus-cli direct -- train pretrain --replay {run.id[:8]}": run.id,
        # bash itself completes names of files where the function has no candidate
        "primus-cli direct -- train pretrain --config no": "" if shell == "bash" else "notes.yaml",
    }
    (tmp_path / "notes.yaml").touch()
    program = "\n".join([SHELLS[shell], *(f"complete_line '{line}'" for line in lines)])
    done = subprocess.run(
        [shell, {"bash": "--norc", "zsh": "-f", "fish": "--no-config"}[shell], "-c", program],
        cwd=tmp_path,
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    registered, *found = done.stdout.splitlines()
    assert "_primus_cli primus-cli" in registered or registered.startswith("complete ")
    assert found == list(lines.values()), done.stderr
