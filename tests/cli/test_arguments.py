"""What people type is understood, or refused with the nearest thing that they may have meant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fakes import cli
from fakes.facts import assume_facts
from primus.cli.main import main
from primus.machine.facts import Cpu, MachineFacts

ROOT = Path(__file__).parents[2]
CONFIG = "modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8}}}\n"


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIMUS_PLUGINS", str(cli.PLUGINS))
    assume_facts(monkeypatch, MachineFacts(cpu=Cpu(usable=16)))
    (tmp_path / "e.yaml").write_text(CONFIG)
    return tmp_path


PRETRAIN = "-- train pretrain --config e.yaml"


@pytest.mark.parametrize(
    ("line", "problem", "hint"),
    [
        ("dirct -- runs list", "no runtime 'dirct'", "did you mean 'direct'?"),
        ("zebra", "no runtime 'zebra'", "valid: box, container, direct, grid, kubernetes, slurm, ssh"),
        ("direct", "no task is given", "primus-cli direct -- <task>"),
        ("direct --", "no task is given", "primus-cli direct -- <task>"),
        ("-- runs list", "no runtime is given", "primus-cli <box|container|direct|grid|kubernetes|slurm|ssh> -- "),
        ("runs lst", "no task 'runs lst'", "did you mean 'list'?"),
        ("--drv-run direct", "unknown option --drv-run", "did you mean '--dry-run'?"),
        ("direct train pretrain", "'train' is a task: put ' -- ' before it", "primus-cli direct -- train ..."),
        (
            "direct --nproc 2 runs list",
            "'runs' is a task: put ' -- ' before it",
            "primus-cli direct -- runs ...",
        ),
        (
            "direct stray -- runs list",
            "runtime 'direct': unexpected word 'stray'",
            "separate runtimes and task by ' -- '",
        ),
        ("direct -- run list", "no task 'run'", "did you mean 'runs'?"),
        ("direct -- pretrain_gpt.py", "'pretrain_gpt.py' is a script, not a task", "config import reads scripts"),
        (
            "direct -- runs",
            "'runs' needs one of: clean, compare, diff, export, gate, import, list, plot, rollouts, show, watch",
            "",
        ),
        ("direct -- runs lst", "no task 'runs lst'", "did you mean 'list'?"),
        (
            "direct -- runs --workspace x",
            "'runs' needs one of: clean, compare, diff, export, gate, import, list, plot, rollouts, show, watch",
            "",
        ),
        ("direct -- bx -- runs list", "no runtime or task 'bx'", "did you mean 'box'?"),
        (
            "direct -- box -- runs list",
            "runtime 'box' (container) cannot run inside 'direct' (node)",
            "the order is cluster",
        ),
        (
            "box -- grid -- runs list",
            "runtime 'grid' (cluster) cannot run inside 'box' (container)",
            "the order is cluster",
        ),
        ("--nproc 2 direct -- runs list", "--nproc is an option of the runtime 'direct'", "primus-cli direct --nproc"),
        ("direct -- --nproc=2 runs list", "--nproc is an option of the runtime 'direct'", "primus-cli direct --nproc"),
        ("direct -- -- runs list", "unexpected word '--'", "'--' stands once before the task"),
        ("direct -- runs -- list", "unexpected word '--'", "it separates runtimes and task: -- runs list"),
        ("direct -- runs list -- x", "task 'runs list': unexpected word '--'", "options follow the task"),
        (
            "direct -- train pretrain -- --config e.yaml",
            "task 'train pretrain': unexpected word '--'",
            "options follow",
        ),
        (
            "direct -- train pretrain \u2013-config e.yaml",
            "\u2013-config: an option begins with hyphens",
            "type --config",
        ),
        (
            "direct -- benchmark gemm --dtype bf17",
            "task 'benchmark': --dtype bf17: Invalid enum",
            "did you mean 'bf16'?",
        ),
        (f"direct {PRETRAIN} --exp_name", "--exp_name: exp_name: it needs a value", "--exp_name VALUE"),
        (f"direct {PRETRAIN} --train_iters --lr 1", "--train_iters: train_iters: it needs a value", ""),
        (f"direct {PRETRAIN} --no_train_iters", "--no_train_iters: train_iters: it is not an on-off option", ""),
        ("direct -- train pretrain --config .\\e.yaml", ".\\e.yaml: no such file", "did you mean 'e.yaml'?"),
        ("direct -- train pretrain --config https://a/e.yaml", "https:/a/e.yaml: no such file", "this is a URL"),
        ("direct -- direct -- runs list", "runtime 'direct' (node) cannot run inside 'direct' (node)", "the order"),
        ("direct --nporc 2 -- runs list", "runtime 'direct': unknown option --nporc", "did you mean '--nproc'?"),
        ("direct --nproc -- runs list", "runtime 'direct': argument --nproc", "expected one argument"),
        ("direct --nproc two -- runs list", "runtime 'direct': --nproc two: expected int, got str", ""),
        ("direct --nproc 0 -- runs list", "--nproc: 0 is not a number of processes or nodes", "use 1 or more"),
        ("direct --nproc 2.5 -- runs list", "runtime 'direct': --nproc 2.5: expected int, got str", ""),
        ("direct --single --nproc 2 -- runs list", "--single runs one process", "remove --nproc"),
        ("direct --nnodes 2 -- runs list", "2 nodes need the address of node 0", "give --master-addr"),
        ("direct --env A -- runs list", "--env A: No such file or directory", "pass NAME=VALUE"),
        ("direct --env 1A=x -- runs list", "--env: '1A' is not a valid variable name", ""),
        ("box --image -- runs list", "runtime 'box': argument --image", "expected one argument"),
        ("grid -N 0 -- runs list", "runtime 'grid': -N 0: expected int >= 1", ""),
        ("direct -- runs list stray", "task 'runs list': unexpected word 'stray'", ""),
        (
            "direct -- runs list --workspce x",
            "task 'runs list': unknown option --workspce",
            "did you mean '--workspace'?",
        ),
        ("direct -- runs show", "task 'runs show' needs RUN", "Run folder, run id"),
        ("direct -- runs diff a", "task 'runs diff' needs B", "Second run."),
        ("direct -- runs show nothing", "no run 'nothing' in output", "the workspace has no runs"),
        ("direct -- runs clean", "runs clean needs a condition", "--keep N"),
        ("direct -- runs clean --keep -1", "task 'runs clean': --keep -1: expected int >= 0", ""),
        (
            "direct -- runs clean --older-than-days -1",
            "task 'runs clean': --older-than-days -1: expected float >= 0",
            "",
        ),
        ("direct -- train pretrain", "train pretrain takes one of --config, --replay and --run", "nothing was given"),
        (f"direct {PRETRAIN} --run x", "train pretrain takes one of", "--config and --run were given"),
        ("direct -- train pretrain --config none.yaml", "none.yaml: no such file", ""),
        ("direct -- train pretrain --config", "task 'train pretrain': argument --config", "expected one argument"),
        (f"direct {PRETRAIN} --train_iter 5", "--train_iter: unknown key 'train_iter'", "did you mean 'train_iters'?"),
        (f"direct {PRETRAIN} stray", "unexpected word 'stray'", "overrides are written --name value"),
        (f"direct {PRETRAIN} -- --lr 1", "task 'train pretrain': unexpected word '--'", ""),
        ("direct -- train pretrain --replay nothing", "no run 'nothing' in output", "the workspace has no runs"),
        (
            "direct -- train pretrain --run . --lr 1",
            "--run resumes a run unchanged and does not accept --lr",
            "new run",
        ),
        ("direct -- config check", "task 'config check' needs --config", "Experiment file."),
        (
            "direct -- train pretrain --confg e.yaml",
            "task 'train pretrain': unknown option --confg",
            "did you mean '--config'?",
        ),
        ("direct -- config check --confg=e.yaml", "task 'config check': unknown option --confg", "'--config'"),
        (
            "direct -- train pretrain e.yaml",
            "task 'train pretrain': unexpected word 'e.yaml'",
            "pass an experiment file as --config e.yaml",
        ),
        ("direct -- config show none.toml --lr 1", "task 'config show': unexpected word 'none.toml'", "--config none"),
        (
            f"direct {PRETRAIN} --nproc 2",
            "task 'train pretrain': --nproc is an option of the runtime 'direct'",
            "put it before the --: primus-cli direct --nproc 2 -- train pretrain ...",
        ),
        (f"direct {PRETRAIN} --nproc_per_node=8", "task 'train pretrain': --nproc_per_node is an option", "--nproc 8"),
        (
            f"slurm srun -N 2 {PRETRAIN} --requeue",
            "task 'train pretrain': --requeue is an option of the runtime 'slurm'",
            "",
        ),
        (
            f"box {PRETRAIN} --image x",
            "task 'train pretrain': --image is an option of the runtime 'box'",
            "box --image",
        ),
        (f"direct {PRETRAIN} --learning_rate 1", "--learning_rate: unknown key 'learning_rate'; use lr", ""),
        (f"direct {PRETRAIN} --no_load_rng", "--no_load_rng: unknown key 'no_load_rng'; it is a setting of Mega", ""),
        (f"direct {PRETRAIN} --exp_name \x1b[2J", "--exp_name: exp_name '\\x1b[2J' holds a control character", ""),
        (f"direct {PRETRAIN} --model a\x07b", "--model: no model 'a\\x07b'", " more"),
        (
            f"direct {PRETRAIN} --config other.yaml",
            "task 'train pretrain': --config is given twice: ",
            "remove one of them",
        ),
        ("direct -- config init lama3", "no model 'lama3'", "similar: llama3"),
    ],
)
def test_a_wrong_line_is_one_message_and_exit_code_2(
    line: str, problem: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"primus-cli: {problem}")
    assert hint in err
    assert out == ""


def test_a_word_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    done = cli.run("direct", "--", "runs", "list", "--workspace", "\udcff", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "primus-cli: '\\udcff' is not UTF-8 text\n")


@pytest.mark.parametrize(
    "line",
    [
        f"--dry-run direct {PRETRAIN}",
        f"direct --dry-run {PRETRAIN}",
        f"direct {PRETRAIN} --dry-run",
        f"direct {PRETRAIN} --dry_run --lr 1",
        "direct -- train pretrain --dry-run --config=e.yaml lr=1",
        "direct -- train pretrain --exp e.yaml --dry-run",
        "direct --nproc=1 --env A=1 B=2 --env C=3 --dry_run -- train pretrain --config e.yaml",
    ],
)
def test_global_options_may_stand_anywhere(line: str, capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    assert main(line.split()) == 0
    assert "primus.worker" in capsys.readouterr().out
    assert [path.name for path in workplace.iterdir()] == ["e.yaml"]


@pytest.mark.parametrize("line", ["", "--help", "-h", "help", "--json --help", "--debug", "--dry-run -h"])
def test_help_of_everything(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 0
    assert capsys.readouterr().out.startswith("usage: primus-cli [options] <runtime>")


@pytest.mark.parametrize("line", ["--version", "--json --version"])
def test_the_version(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 0
    assert capsys.readouterr().out.startswith("primus ")


@pytest.mark.parametrize(
    ("line", "usage"),
    [
        ("direct --help", "usage: primus-cli direct [options]"),
        ("direct -h -- runs list", "usage: primus-cli direct -- runs list [options]"),
        ("direct -- --help", "usage: primus-cli direct [options]"),
        ("grid -- box --help", "usage: primus-cli grid [options]"),
        ("direct -- runs --help", "usage: primus-cli <runtime> -- runs <subtask> [options]"),
        ("direct -- runs list -h", "usage: primus-cli direct -- runs list [options]"),
        ("direct -- train pretrain --config none.yaml --help", "usage: primus-cli direct -- train pretrain [options]"),
        ("grid -- box -- train pretrain --help", "usage: primus-cli box -- train pretrain [options]"),
    ],
)
def test_help_of_what_is_named(line: str, usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 0
    assert capsys.readouterr().out.startswith(usage)


def test_tasks_may_be_typed_with_dashes_or_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["direct", "--", "runs", "list", "--workspace=none"]) == 0
    assert capsys.readouterr().out == "no runs in none\n"


def test_debug_shows_where_an_error_comes_from(tmp_path: Path) -> None:
    done = cli.run("--debug", "direct", "--", "config", "check", "--config", "none.yaml", cwd=tmp_path)
    assert "Traceback" in done.stderr
    assert "UsageError: none.yaml: no such file" in done.stderr


def test_output_that_nobody_reads_is_no_error(tmp_path: Path) -> None:
    with cli.started("direct", "--", "config", "schema", cwd=tmp_path) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        errors = process.stderr.read()
        assert (process.wait(20), errors) == (0, "")


def test_text_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    words = ("direct", "--", "runs", "list", "--workspace", "läufe")
    done = cli.run(*words, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "no runs in l\\xe4ufe\n")


def test_a_global_option_is_accepted_before_the_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("direct -- --json runs list --workspace none".split()) == 0
    assert capsys.readouterr().out == "[]\n"


@pytest.mark.parametrize(
    ("redirection", "expected"),
    [(">/dev/full", (1, "primus-cli: <stdout>: No space left on device\n")), (">&-", (0, ""))],
)
def test_standard_output_may_be_full_or_closed(redirection: str, expected: tuple[int, str], tmp_path: Path) -> None:
    words = ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-m", "primus", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=cli.environment())
    assert (done.returncode, done.stderr) == expected


def test_setup_has_help() -> None:
    done = subprocess.run([ROOT / "primus-cli", "setup", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "./primus-cli setup [--dev]" in done.stdout


def test_a_task_without_a_runtime_runs_here_and_says_so(tmp_path: Path) -> None:
    note = "no runtime is given: this runs on this machine, as 'primus-cli direct -- runs ...' does"
    done = cli.run("runs", "list", "--json", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", f"primus-cli: {note}\n")
    planned = cli.run("--dry-run", "runs", "list", cwd=tmp_path)
    assert planned.stderr == "" and f"note: {note}" in planned.stdout
    assert cli.run("engines", "--json", cwd=tmp_path).stderr == "", "it concerns this machine only"
