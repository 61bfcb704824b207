"""Tab completes runtimes, tasks, options and their values; in bash itself, too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from primus import registry
from primus.cli.completion import SCRIPTS, list_candidates
from primus.cli.main import main
from primus.config.flags import list_flags
from primus.runtime import RUNTIMES


def complete(line: str) -> list[str]:
    """Candidates at the end of a command line, whose last word may be empty."""
    return list_candidates(line.split(" ")[1:])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("primus-cli d", ["direct"]),
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


def test_an_unknown_shell_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 2
    assert "bash" in capsys.readouterr().err


def run_shell(shell: str, program: str, tmp_path: Path) -> list[str]:
    """Lines that a program prints in a shell without a user's settings, where `primus-cli` is on the path."""
    (tmp_path / "notes.yaml").touch()
    environ = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(
        [shell, "--norc" if shell == "bash" else "-f", "-c", program],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.split("\n")


BASH = """
eval "$(primus-cli completion bash)"
complete -p primus-cli
for line in "primus-cli direct -- config ch" "primus-cli direct -- data dedup --method "; do
    read -ra COMP_WORDS <<< "$line"
    [[ "$line" == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    _primus_cli
    echo "${COMPREPLY[*]}"
done
"""


def test_bash_completes_command_lines(tmp_path: Path) -> None:
    registered, subtask, methods, *_ = run_shell("bash", BASH, tmp_path)
    assert registered.endswith("-F _primus_cli primus-cli") and "-o default" in registered, "files are completed, too"
    assert (subtask, methods) == ("check", "exact minhash")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_command_lines(tmp_path: Path) -> None:
    program = f"""
    compdef() {{ }}; compadd() {{ print -l -- "${{(@P)argv[2]}}" }}
    {SCRIPTS["zsh"]}
    words=(primus-cli direct -- data dedup --method ""); CURRENT=$#words
    _primus_cli
    """
    assert run_shell("zsh", program, tmp_path)[:2] == ["exact", "minhash"]
