"""Each plug-in of examples/plug-ins, which the pages of docs/plug-ins show, does what its kind is for."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from fakes import cli
from primus import registry
from primus.plug_in_check import KINDS

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples/plug-ins"


def run(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    env = {"PRIMUS_PLUGINS": str(EXAMPLES), "HOME": str(cwd), **env}
    done = cli.run(*words, cwd=cwd, timeout_s=120, **env)
    assert "Traceback" not in done.stderr
    return done


def test_there_is_an_example_of_every_kind() -> None:
    folders = {path.name for path in EXAMPLES.iterdir()}
    assert {*KINDS, "hooks", "models", "profiles", "trainers"} - registry.PARTS.keys() <= folders
    parts = {kind: EXAMPLES / "frameworks/counting" / registry.PARTS[kind] for kind in registry.PARTS.keys() & KINDS}
    assert {kind for kind, part in parts.items() if not part.exists()} == {"checkpoints"}  # counting has no weights


def test_the_task_prints_text_or_json(tmp_path: Path) -> None:
    assert run("direct", "--", "hello", "Ann", "--loud", cwd=tmp_path).stdout == "hello Ann!\n"
    assert json.loads(run("direct", "--", "hello", "--json", cwd=tmp_path).stdout) == {"greeting": "hello world"}


def test_the_task_with_workers_starts_them(tmp_path: Path) -> None:
    done = run("direct", "--single", "--", "tools", "list-ranks", "--greeting", "yes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 1: yes\n" in done.stdout
    assert '"ranks_listed"' in (tmp_path / "output/list-ranks/latest/events.jsonl").read_text()


def test_the_runtime_wraps_the_command(tmp_path: Path) -> None:
    done = run("--dry-run", "nice", "--level", "3", "--", "direct", "--", "hello", cwd=tmp_path)
    assert "nice -n 3 " in done.stdout
    assert run("nice", "--", "direct", "--", "hello", cwd=tmp_path).stdout == "hello world\n"


PBS = {
    "qsub": 'echo 42.server; cd "$HOME" && echo host-a >hosts && PBS_JOBID=42.server PBS_NODEFILE=$PWD/hosts '
    'bash "$1" >"$(dirname "$1")/logs/pbs.log" 2>&1 </dev/null; echo $? >"$HOME/code"',
    "pbsdsh": 'shift 3; exec "$@"',
    "qstat": 'printf \'{"Jobs": {"42.server": {"job_state": "F", "Exit_status": %s}}}\' "$(cat "$HOME/code")"',
    "qdel": "exit 1",
}
"""Programs that stand for those of PBS: a job runs at once, on one node that is this machine."""


def test_the_runtime_of_pbs_runs_a_job_on_its_node(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, body in PBS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PWD": str(tmp_path)}
    submitted = run("pbs", "--queue", "gpu", "--", "hello", "Ann", cwd=tmp_path, **environ)
    assert submitted.returncode == 0, submitted.stderr
    assert "job 42.server is queued" in submitted.stdout + submitted.stderr
    waited = run("direct", "--", "jobs", "wait", "42.server", cwd=tmp_path, **environ)
    assert waited.returncode == 0, waited.stderr
    assert "hello Ann\n" in run("direct", "--", "jobs", "logs", "42.server", cwd=tmp_path, **environ).stdout
    (script,) = tmp_path.glob("output/hello/2*/job.pbs")
    assert "#PBS -q gpu" in script.read_text()
    again = run("pbs", "--", "hello", cwd=tmp_path, **{**environ, "PATH": os.environ["PATH"]})
    assert again.returncode == 1 and "qsub: " in again.stderr
    assert len(list(tmp_path.glob("output/hello/2*"))) == 1, "what was not submitted leaves no run"


def test_the_job_runtime_submits_lists_and_prints_the_log(tmp_path: Path) -> None:
    submitted = run("background", "--", "direct", "--", "hello", "Ann", cwd=tmp_path)
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.partition("job ")[2].partition(";")[0]
    waited = run("direct", "--", "jobs", "wait", job, cwd=tmp_path)
    assert waited.returncode == 0, waited.stderr
    assert run("direct", "--", "jobs", "logs", job, cwd=tmp_path).stdout == "hello Ann\n"
    cancelled = run("direct", "--", "jobs", "cancel", job, cwd=tmp_path)
    assert "done" in cancelled.stdout


def test_the_job_runtime_cancels_a_job_that_runs(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    subprocess.run(["mkfifo", str(fifo)], check=True)
    task = tmp_path / "own/tasks/block.py"
    task.parent.mkdir(parents=True)
    task.write_text(
        '"""Block."""\nfrom msgspec import Struct\nclass Options(Struct):\n    """Options."""\n'
        f"def run(options, context):\n    open({str(fifo)!r})\n"
    )
    plug_ins = f"{EXAMPLES}:{tmp_path / 'own'}"
    submitted = run("background", "--", "direct", "--", "block", cwd=tmp_path, PRIMUS_PLUGINS=plug_ins)
    job = submitted.stdout.partition("job ")[2].partition(";")[0]
    assert run("direct", "--", "jobs", "cancel", job, cwd=tmp_path).returncode == 0
    waited = run("direct", "--", "jobs", "wait", job, cwd=tmp_path)
    assert waited.returncode != 0
    assert "failed" in waited.stdout + waited.stderr


EXPERIMENT = "modules:\n  pre_trainer: {framework: counting, model: mine_1B, config: fast, overrides: {stride: 2}}\n"


def test_backend_model_trainer_and_hook_serve_one_experiment(tmp_path: Path) -> None:
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    done = run("direct", "--single", "--", "train", "pretrain", "--config", "night.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    latest = tmp_path / "output/night/latest"
    assert '"step":5,"loss":0.1' in (latest / "events.jsonl").read_text()
    assert "num_layers: 8" in (latest / "config/model_config.yaml").read_text()
    assert json.loads((latest / "plan.json").read_text())["env"]["NCCL_DEBUG"]["value"] == "WARN"
    refused = run("direct", "--", "train", "pretrain", "--config", "night.yaml", "--stride", "0", cwd=tmp_path)
    assert (refused.returncode, refused.stderr.splitlines()[0]) == (
        2,
        "primus-cli: stride: 0: must be a positive integer",
    )


def test_the_observer_keeps_the_last_step_of_a_run_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "night.yaml").write_text(EXPERIMENT.replace("stride: 2", "stride: 2, observers: last_step"))
    done = run("direct", "--single", "--", "train", "pretrain", "--config", "night.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "output/night/latest/last_step.txt").read_text().startswith("done 5 0.1")


@pytest.mark.native
def test_the_callback_prints_the_mean_loss_of_the_steps(tmp_path: Path) -> None:
    experiment = ROOT / "examples/quickstart.yaml"
    callbacks = "[{plateau: {interval: 2}}]"
    small = ["--seq_length", "16", "--micro_batch_size", "1", "--sample_tokens", "0", "--num_layers", "1"]
    words = ["train", "pretrain", "--config", str(experiment), "--train_iters", "2", "--callbacks", callbacks, *small]
    done = run("direct", "--single", "--", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mean loss of steps up to 2: " in done.stdout


def test_the_source_is_prepared_by_its_name(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    words = "direct -- data prepare --dataset haiku --tokenizer bpe:300 --output tokens --json"
    done = run(*words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1000" in done.stdout


def test_the_patch_is_needed_where_its_variable_is_set(tmp_path: Path) -> None:
    def states(**env: str) -> dict[str, str]:
        listed = json.loads(run("direct", "--", "patches", "list", "--json", cwd=tmp_path, **env).stdout)
        return {each["choice"]["name"]: each["choice"]["state"] for each in listed["patches"]}

    assert states()["host-proc"] == "not needed"
    assert states(HOST_PROC="/host/proc")["host-proc"] == "applies"


def test_a_framework_is_one_folder_that_imports_trains_exports_and_extracts(tmp_path: Path) -> None:
    (tmp_path / "counts.yaml").write_text("counts: 3\nstride: 2\nspeed: fast\n")
    imported = run("direct", "--", "config", "import", "counts.yaml", "--output", "run.yaml", cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr
    assert "speed" in imported.stderr
    edited = (tmp_path / "run.yaml").read_text().replace("train_iters: 3", "counts: 5")
    assert "counts: 5" in edited
    (tmp_path / "run.yaml").write_text(edited)
    (tmp_path / "run.sh").write_text("STEPS=9\npython count.py --counts $STEPS --stride 4 --speed fast\n")
    read = run("direct", "--", "config", "import", "run.sh", cwd=tmp_path)
    assert "train_iters: 9" in read.stdout and "stride: 4" in read.stdout
    assert "speed fast: counting has no such setting" in read.stderr
    trained = run("direct", "--single", "--", "train", "pretrain", "--config", "run.yaml", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    exported = run("direct", "--", "config", "export", "--config", "run.yaml", "--to", "counting", cwd=tmp_path)
    assert exported.stdout == "counts: 5\nstride: 2\n"
    log = next((tmp_path / "output").rglob("rank_0.log"))
    extracted = json.loads(run("direct", "--", "compare", "extract", str(log), "--json", cwd=tmp_path).stdout)
    assert json.dumps(extracted).count('"counting"') > 0
    assert "0.166667" in json.dumps(extracted)


def test_profile_and_framework_decide_the_variables_of_a_machine(tmp_path: Path) -> None:
    done = run("direct", "--", "env", "show", "--assume", "mi999x", "--framework", "counting", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "MI999X (gfx950" in done.stdout
    assert "COUNTING_BASE" in done.stdout


def test_the_pages_of_plug_ins_show_every_example() -> None:
    pages = [ROOT / "docs/plug-ins.md", *(ROOT / "docs/plug-ins").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for path in EXAMPLES.rglob("*.*"):
        if path.suffix in (".py", ".yaml"):
            assert f"`{path.relative_to(EXAMPLES)}`" in pages[0].read_text(encoding="utf-8")
            assert path.read_text(encoding="utf-8").strip() in text


@pytest.mark.native
def test_the_benchmark_measures_its_call(tmp_path: Path) -> None:
    words = "direct --single -- benchmark softmax --columns 8 --quick --device cpu --json --duration 0.2"
    done = run(*words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [row] = json.loads(done.stdout)["result"]["ranks"][0]["rows"]
    assert (row["case"]["columns"], row["unit"], row["bound"] != "") == (8, "GB/s", True)
