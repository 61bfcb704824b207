"""A task that leaves this process: its run folder, what travels, and how its end is recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fakes import cli
from primus.errors import UsageError
from primus.launch import prepare
from primus.launch.command import parse_segment_options
from primus.launch.run_remote import pass_secrets_by_name
from primus.redaction import is_secret_name
from primus.runs.store import Run, list_workspace_runs
from primus.runtime import RequestSegment

EXPERIMENT = """\
exp_name: night
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 3}}}
"""
GSUB = """\
#!/bin/sh
# A scheduler of one node that does not wait: it runs the script at once.
printf '%s\\n' "$@" > gsub.argv
env > gsub.env
exec sh "$1"
"""
BOX = '#!/bin/sh\nprintf "%s\\n" "$@" > box.argv\nshift 2\nexec "$@"\n'


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    (tmp_path / "bin").mkdir()
    for name, text in (("gsub", GSUB), ("box", BOX)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run(workplace: Path, *words: str, **env: str | None) -> subprocess.CompletedProcess[str]:
    return cli.run(*words, cwd=workplace, PATH=f"{workplace}/bin:{os.environ['PATH']}", **env)


def only_run(workplace: Path) -> Run:
    (found,) = list_workspace_runs(workplace / "output")
    return found


TRAIN = ("train", "pretrain", "--config", "night.yaml", "--train_iters", "2")


def test_a_nested_run_is_planned_here_and_done_there_in_one_folder(workplace: Path) -> None:
    done = run(workplace, "grid", "-N", "4", "--", "box", "--", *TRAIN)
    assert done.returncode == 0, done.stderr
    found = only_run(workplace)
    metadata = found.read_metadata()
    assert (metadata.outcome.state, metadata.attempts) == ("done", 1)
    assert metadata.runtimes == ["grid", "box"]
    assert metadata.command == ["grid", "-N", "4", "--", "box", "--", *TRAIN]
    script = (found.directory / "job.sh").read_text()
    assert f"{prepare.find_entry_point()} box -- direct -- train pretrain --run {found.directory}" in script
    assert json.loads((found.directory / "launch.grid.json").read_text())["argv"] == [
        "gsub",
        f"{found.directory}/job.sh",
    ]
    assert json.loads((found.directory / "plan.json").read_text())["layout"]["nproc"] == 1, "the node's own plan"
    assert "train_iters: 2" in found.config.read_text(), "overrides were resolved before the queue"


def test_a_dry_run_touches_nothing(workplace: Path) -> None:
    before = sorted(workplace.rglob("*"))
    done = run(workplace, "--dry-run", "grid", "--", "box", "--", *TRAIN)
    assert done.returncode == 0, done.stderr
    assert "run folder: " in done.stdout
    assert sorted(workplace.rglob("*")) == before


def test_a_task_without_workers_goes_as_it_was_typed_and_needs_no_folder(workplace: Path) -> None:
    done = run(workplace, "--json", "box", "--", "runs", "list")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    assert not (workplace / "output").exists()
    words = (workplace / "box.argv").read_text().splitlines()
    assert words == ["run", "cardboard", prepare.find_entry_point(), "--json", "direct", "--", "runs", "list"]


def test_a_secret_of_an_inner_runtime_travels_by_name(workplace: Path) -> None:
    options = ("--env", "A_TOKEN=canary-1", "PLAIN=x y", "--env=B_KEY=canary-2", "--env", "PROXY=http://me:canary-3@h")
    done = run(workplace, "grid", "--", "box", "--", "direct", *options, "--", *TRAIN)
    assert done.returncode == 0, done.stderr
    environment = (workplace / "gsub.env").read_text()
    for assignment in ("A_TOKEN=canary-1", "B_KEY=canary-2", "PROXY=http://me:canary-3@h"):
        assert assignment in environment
    (workplace / "gsub.env").unlink()
    text = "".join(path.read_text(errors="replace") for path in workplace.rglob("*") if path.is_file())
    assert "canary" not in text + done.stdout + done.stderr
    dump = (only_run(workplace).directory / "env/primus_env_dump.txt").read_text()
    assert "A_TOKEN=<secret>  # --env" in dump
    assert "PLAIN=x y  # --env" in dump


def test_a_variable_that_the_innermost_runtime_names_travels_by_its_name(workplace: Path) -> None:
    """Else it would be looked for where it is not, as inside a container."""
    task = ("direct", "--env", "MINE", "A_TOKEN", "--env=LD_X", "--", *TRAIN)
    variables = {"MINE": "a b", "A_TOKEN": "canary", "LD_X": "/lib x"}
    done = run(workplace, "--dry-run", "container", "--engine", "podman", "--image", "x", "--", *task, **variables)
    assert done.returncode == 0, done.stderr
    outer, _, inner = done.stdout.partition(" x /")
    assert "--env A_TOKEN " in outer and "--env MINE " in outer
    assert "direct --env 'LD_X=/lib x' --env MINE A_TOKEN --env=LD_X" in inner.partition("environment")[0]
    assert "canary" not in done.stdout


def test_each_node_keeps_its_own_plan_of_what_it_starts(workplace: Path) -> None:
    assert run(workplace, "box", "--", *TRAIN).returncode == 0
    found = only_run(workplace)
    for rank, variable in ((1, "NODE_RANK"), (2, "SLURM_NODEID")):
        words = ("--no-config", "box", "--", "direct", "--", "train", "pretrain", "--run", str(found.directory))
        run(workplace, *words, **{variable: str(rank)})
    plans = {path.name for path in found.directory.glob("launch.*.json")}
    assert plans == {"launch.box.json", "launch.box.node_1.json", "launch.box.node_2.json"}


@pytest.mark.parametrize(
    "words",
    [
        ("grid", "--", "tiny", "--hub-token", "canary"),
        ("grid", "--", "direct", "--hub-token=canary", "--", "tiny"),
    ],
)
def test_a_secret_that_would_stand_in_another_programs_words_is_refused(
    words: tuple[str, ...], workplace: Path
) -> None:
    done = run(workplace, *words)
    assert done.returncode == 2
    assert "canary" not in done.stdout + done.stderr


def test_a_program_that_ends_before_any_node_begins_is_recorded(workplace: Path) -> None:
    (workplace / "bin/gsub").write_text("#!/bin/sh\nexit 7\n")
    done = run(workplace, "grid", "--", *TRAIN)
    assert done.returncode == 7
    outcome = only_run(workplace).read_metadata().outcome
    assert (outcome.state, outcome.exit_code) == ("failed", 7)
    assert outcome.reason == "gsub exited with code 7, before any node started"


def test_a_missing_program_is_one_message(workplace: Path) -> None:
    (workplace / "bin/gsub").unlink()
    done = run(workplace, "grid", "--", *TRAIN)
    assert done.returncode == 1
    assert "gsub: cannot be started: No such file" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_signal_reaches_the_program_and_the_run_is_interrupted(workplace: Path) -> None:
    (workplace / "bin/gsub").write_text(
        "#!/bin/sh\ntrap 'echo told; exit 143' TERM\ntouch ready\nsleep 30 >gsub.out 2>&1 & wait\n"
    )
    path = f"{workplace}/bin:{os.environ['PATH']}"
    with cli.started("grid", "--", *TRAIN, cwd=workplace, PATH=path) as process:
        cli.wait_for((workplace / "ready").exists, "the program to start")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 143
    assert "told" in out
    assert only_run(workplace).read_metadata().outcome.state == "interrupted"


def test_an_unfinished_run_is_continued_there(workplace: Path) -> None:
    assert run(workplace, "grid", "--", *TRAIN).returncode == 0
    found = only_run(workplace)
    done = run(workplace, "grid", "--", "train", "pretrain", "--run", str(found.directory))
    assert done.returncode == 0, done.stderr
    assert only_run(workplace).read_metadata().attempts == 2


NAMES = st.sampled_from(["A", "MY_TOKEN", "WANDB_API_KEY", "URL", "a.b"])
VALUES = st.text(alphabet="a =-$'\"`\n,;é", max_size=8) | st.just("postgres://me:pw@host/db")


@given(st.lists(st.tuples(st.sampled_from(["--env {}={}", "--env={}={}"]), NAMES, VALUES), max_size=4))
@example([("--env {}={}", "MY_TOKEN", "--env")])
def test_no_secret_value_is_left_in_the_words_of_a_runtime(typed: list[tuple[str, str, str]]) -> None:
    words: list[str] = []
    for form, name, value in typed:
        assignment = f"{name}={value}"
        words += ["--env", assignment] if form.startswith("--env ") else [f"--env={assignment}"]
    kept, found = pass_secrets_by_name(tuple(words))
    for before, after in zip(words, kept, strict=True):
        name, _, value = before.removeprefix("--env=").partition("=")
        assert after == before or (name in found and after == before[: len(before) - len(value) - 1])
    assert not any("pw@" in word for word in kept)
    assert not any(is_secret_name(name) and f"{name}=" in word for _, name, _ in typed for word in kept)


def test_a_segment_keeps_words_that_are_no_variables() -> None:
    words = ("--nproc", "2", "--env", "A_KEY=x", "B=y", "--single", "C_KEY=z")
    assert pass_secrets_by_name(words) == (
        ("--nproc", "2", "--env", "A_KEY", "B=y", "--single", "C_KEY=z"),
        {"A_KEY": "x"},
    )


def test_the_entry_is_that_of_the_checkout() -> None:
    assert Path(prepare.find_entry_point()).name == "primus-cli"
    assert Path(prepare.find_entry_point()).is_file()


def test_options_of_an_unknown_shape_are_refused_before_anything_is_made(workplace: Path) -> None:
    with pytest.raises(UsageError, match="unknown option"):
        parse_segment_options(RequestSegment("direct", ("--nodez", "3")))


@pytest.mark.parametrize(
    "runtimes",
    [
        "slurm sbatch -N 2",
        "slurm srun -N 2 -- container --image x --mount /data:/data",
        "container --image x --mount /nfs/x:/data",
        "ssh --hosts a,b",
        "kubernetes create --replica 2 --gpu 8 --image x --volume pvc:/data",
    ],
)
def test_data_of_another_place_stop_no_plan(workplace: Path, runtimes: str) -> None:
    words = ("--mock_data", "false", "--train_data_path", "/only/there/text_document")
    task = ("--", "train", "pretrain", "--config", "night.yaml", *words)
    done = run(workplace, "--dry-run", *runtimes.split(), *task)
    assert done.returncode == 0, done.stderr
    assert "/only/there/text_document.idx on this machine" in done.stdout and "checked on the nodes: " in done.stdout
    here = run(workplace, "--dry-run", "direct", *task)
    assert here.returncode == 2 and "no such data: /only/there/text_document.idx" in here.stderr
