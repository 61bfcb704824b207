"""Hooks and patches change, stop and follow a launch; what they did and said is in the run folder."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fakes import cli
from primus.launch.nodes import rendezvous

EXPERIMENT = """\
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 3}}}
"""
TRAIN = ("train", "pretrain", "--config", "night.yaml")


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hooks of the developer, and a lock of this test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


def write(folder: Path, **files: str) -> None:
    """Files by name, `__` for a slash and `_sh` or `_py` for the ending."""
    for name, text in files.items():
        path = folder / re.sub(r"_(sh|py|yaml)$", r".\1", name.replace("__", "/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def launched(folder: Path, *words: str, **env: str | None) -> subprocess.CompletedProcess[str]:
    return cli.run("direct", *words, cwd=folder, **env)


def latest(folder: Path) -> Path:
    return next(folder.glob("out*/*/latest")).resolve()


def read(folder: Path, name: str) -> Any:
    return json.loads((latest(folder) / name).read_text())


def hook_log(folder: Path, name: str) -> str:
    return (latest(folder) / f"logs/hooks/{name}.log").read_text()


def everything(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in latest(folder).rglob("*") if path.is_file())


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


# -- before the workers --


def test_a_hook_is_told_of_the_launch_and_sets_variables(tmp_path: Path) -> None:
    write(tmp_path, hooks__1_a_sh="env | grep ^PRIMUS_ | sort\necho $@\necho env.SHOWN=from-hook\n")
    done = launched(tmp_path, "--", "tiny", "end")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("hook hooks/1_a.sh\nrun out/tiny/")
    run = latest(tmp_path)
    lines = hook_log(tmp_path, "before_1_a.node_0").splitlines()
    told = dict(line.split("=", 1) for line in lines if line.startswith("PRIMUS_"))
    assert told["PRIMUS_TASK"] == "tiny"
    assert told["PRIMUS_RUN_DIR"] == str(run)
    assert told["PRIMUS_HOOK_STAGE"] == "before"
    assert (told["PRIMUS_NODE_RANK"], told["PRIMUS_NNODES"], told["PRIMUS_NPROC"]) == ("0", "1", "1")
    assert "tiny end" in lines
    assert "variable from-hook" in (run / "logs/rank_0.log").read_text()
    assert "SHOWN=from-hook  # hook:hooks/1_a.sh\n" in (run / "env/primus_env_dump.txt").read_text()


@pytest.mark.parametrize(
    ("words", "env", "seen", "who"),
    [
        ((), {"SHOWN": "shell"}, "shell", "the shell"),
        (("--env", "SHOWN=typed"), {}, "typed", "--env"),
        (("--env-file", "vars"), {}, "file", "--env-file vars:1"),
    ],
)
def test_what_the_user_has_set_stays(
    tmp_path: Path, words: tuple[str, ...], env: dict[str, str], seen: str, who: str
) -> None:
    write(tmp_path, vars="SHOWN=file\n", hooks__1_a_sh="echo env.SHOWN=hook\n")
    done = launched(tmp_path, *words, "--", "tiny", **env)
    assert done.returncode == 0, done.stderr
    assert f"variable {seen}\n" in (latest(tmp_path) / "logs/rank_0.log").read_text()
    remark = f"SHOWN keeps the value of {who}"
    assert f"hook hooks/1_a.sh: {remark}\n" in done.stdout
    assert remark in hook_log(tmp_path, "before_1_a.node_0")


def test_what_a_hook_adds_to_a_list_of_the_users_is_taken(tmp_path: Path) -> None:
    write(
        tmp_path,
        hooks__1_a_sh="echo env.LIST_PATH=/first:$LIST_PATH\n",
        hooks__2_b_sh="echo env.LIST_PATH=$LIST_PATH:/last\necho env.OTHER_PATH=/mine\n",
    )
    done = launched(tmp_path, "--", "tiny", LIST_PATH="/a:/b", OTHER_PATH="/a")
    assert done.returncode == 0, done.stderr
    env = read(tmp_path, "plan.json")["env"]
    assert env["LIST_PATH"] == {"value": "/first:/a:/b:/last", "source": "hook:hooks/2_b.sh"}
    assert "OTHER_PATH" not in env
    assert "OTHER_PATH keeps the value of the shell" in done.stdout


@pytest.mark.parametrize(("name", "words"), [("RANK", ()), ("WORLD_SIZE", ("--patch", "hooks/1_a.sh"))])
def test_what_the_launcher_gives_each_rank_is_not_for_hooks(tmp_path: Path, name: str, words: tuple[str, ...]) -> None:
    write(tmp_path, hooks__1_a_sh=f"echo env.{name}=5\n")
    done = launched(tmp_path, *words, "--", "tiny")
    assert done.returncode == 1
    assert f"hook hooks/1_a.sh: {name} is set by the launcher for each rank" in done.stderr


def test_a_rank_that_the_shell_has_left_over_misleads_nobody(tmp_path: Path) -> None:
    done = launched(tmp_path, "--", "tiny", RANK="5", LOCAL_RANK="5")
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 1 does end" in done.stdout


def test_a_patch_wins_over_a_hook_and_later_over_earlier(tmp_path: Path) -> None:
    write(
        tmp_path,
        hooks__1_a_sh="echo env.SHOWN=1\necho env.OTHER=1\n",
        hooks__2_b_sh="echo env.OTHER=$OTHER+2\n",
        p_sh="echo env.SHOWN=patch\n",
    )
    launched(tmp_path, "--patch", "p.sh", "--", "tiny")
    env = read(tmp_path, "plan.json")["env"]
    assert env["SHOWN"] == {"value": "patch", "source": "patch:p.sh"}
    assert env["OTHER"] == {"value": "1+2", "source": "hook:hooks/2_b.sh"}, "a hook sees what earlier ones set"


def test_settings_of_a_hook_are_resolved_and_checked_like_typed_ones(tmp_path: Path) -> None:
    write(tmp_path, night_yaml=EXPERIMENT, hooks__train__1_a_sh="echo extra.train_iters=2\necho extra.lr=0.5\n")
    done = launched(tmp_path, "--", *TRAIN, "--lr", "0.25")
    assert done.returncode == 0, done.stderr
    origins = read(tmp_path, "config/origins.json")
    assert (origins["train_iters"], origins["lr"]) == ("hook: --train_iters", "--lr")
    resolved = (latest(tmp_path) / "config/primus_config.yaml").read_text()
    assert "train_iters: 2\n" in resolved
    assert "lr: 0.25\n" in resolved, "what was typed wins"
    assert "hook setting --lr=0.5 is overridden by the command line" in (latest(tmp_path) / "plan.json").read_text()


def test_a_setting_that_does_not_exist_names_the_hook(tmp_path: Path) -> None:
    write(tmp_path, night_yaml=EXPERIMENT, hooks__1_a_sh="echo extra.train_itres=2\n")
    done = launched(tmp_path, "--", *TRAIN)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "primus-cli: hook hooks/1_a.sh: --train_itres: unknown key 'train_itres'; did you mean"
    )
    assert read(tmp_path, "metadata.json")["outcome"]["state"] == "failed"


def test_a_task_without_an_experiment_takes_no_settings(tmp_path: Path) -> None:
    write(tmp_path, hooks__1_a_sh="echo extra.lr=2\n")
    done = launched(tmp_path, "--", "tiny")
    assert done.returncode == 2
    assert "hook hooks/1_a.sh: task 'tiny' does not accept settings from hooks: --lr=2" in done.stderr


def test_a_run_that_hooks_have_changed_is_continued_and_replayed(tmp_path: Path) -> None:
    write(tmp_path, night_yaml=EXPERIMENT, hooks__1_a_sh="echo extra.train_iters=2\necho env.SHOWN=$VALUE\n")
    assert launched(tmp_path, "--", *TRAIN, VALUE="x").returncode == 0
    first = latest(tmp_path)
    again = launched(tmp_path, "--", "train", "pretrain", "--run", str(first), VALUE="x")
    assert (again.returncode, again.stderr) == (0, "")
    replayed = launched(tmp_path, "--", "train", "pretrain", "--replay", str(first), VALUE="y")
    assert (replayed.returncode, replayed.stderr) == (0, "")
    assert "SHOWN keeps the value of replay of" in replayed.stdout
    write(tmp_path, hooks__1_a_sh="echo extra.train_iters=1\n")
    for option in ("--run", "--replay"):
        changed = launched(tmp_path, "--", "train", "pretrain", option, str(first))
        assert changed.returncode == 2
        assert "hook hooks/1_a.sh: --train_iters=1 changes the configuration of an existing run" in changed.stderr


def test_an_unfinished_run_that_hooks_have_changed_is_found_again(tmp_path: Path) -> None:
    write(tmp_path, night_yaml=EXPERIMENT, hooks__1_a_sh="echo extra.train_iters=2\n")
    words = ("--", *TRAIN, "--auto_continue_train")
    assert launched(tmp_path, *words).returncode == 0
    first = latest(tmp_path)
    metadata = read(tmp_path, "metadata.json")
    metadata["outcome"] = {"state": "interrupted", "exit_code": 143}
    (first / "metadata.json").write_text(json.dumps(metadata))
    write(first, checkpoints__step_00000001__manifest_json="")
    (first / "checkpoints/step_00000001/manifest_json").rename(first / "checkpoints/step_00000001/manifest.json")
    again = launched(tmp_path, *words)
    assert again.returncode == 0, again.stderr
    assert f"continuing output/night/{first.name}\n" in again.stdout


# -- failures --


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo one\necho two >&2\nexit 3", "exit code 3"),
        (
            "# primus: timeout=0.4\necho one\nsleep 300 & echo pid $!\nwhile :; do sleep 0.1; done",
            "it was not over after",
        ),
        ("echo one\nkill -9 $$", "killed by SIGKILL"),
    ],
)
def test_a_failing_hook_stops_the_launch_and_is_told(tmp_path: Path, text: str, problem: str) -> None:
    write(
        tmp_path, hooks__1_a_sh=text, hooks__failure__1_f_sh="echo $PRIMUS_OUTCOME $PRIMUS_EXIT_CODE $PRIMUS_REASON\n"
    )
    done = launched(tmp_path, "--", "tiny")
    assert done.returncode == 1
    assert done.stderr.startswith(f"primus-cli: hook hooks/1_a.sh failed: {problem}")
    assert "  | one\n" in done.stderr
    assert f"  log: {latest(tmp_path)}/logs/hooks/before_1_a.node_0.log\n" in done.stderr
    outcome = read(tmp_path, "metadata.json")["outcome"]
    assert (outcome["state"], outcome["exit_code"]) == ("failed", 1)
    assert outcome["reason"].startswith(f"hook hooks/1_a.sh failed: {problem}")
    assert not list(latest(tmp_path).glob("logs/attempt_*")), "no worker was started"
    assert f"failed 1 hook hooks/1_a.sh failed: {problem}" in hook_log(tmp_path, "failure_1_f.node_0")
    assert all(is_gone(int(pid)) for pid in re.findall(r"pid (\d+)", hook_log(tmp_path, "before_1_a.node_0")))


def test_later_hooks_do_not_run_after_a_failed_one(tmp_path: Path) -> None:
    write(tmp_path, hooks__1_a_sh="exit 1", hooks__2_b_sh="touch ran")
    assert launched(tmp_path, "--", "tiny").returncode == 1
    assert not (tmp_path / "ran").exists()


def test_a_signal_ends_the_hook_and_the_launch(tmp_path: Path) -> None:
    write(tmp_path, hooks__1_a_sh="sleep 300 & echo $! > pid\nwait\n", hooks__failure__1_f_sh="echo $PRIMUS_OUTCOME")
    with cli.started("direct", "--", "tiny", cwd=tmp_path) as process:
        cli.wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the hook")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=15)
    assert process.returncode == 143
    assert errors == "primus-cli: hook hooks/1_a.sh failed: interrupted by SIGTERM\n"
    assert is_gone(int((tmp_path / "pid").read_text()))
    assert read(tmp_path, "metadata.json")["outcome"]["state"] == "interrupted"
    assert "interrupted\n" in hook_log(tmp_path, "failure_1_f.node_0")


BUSY = """
import subprocess, time
start = subprocess.Popen.__init__
def start_and_wait(*arguments, **options):
    start(*arguments, **options)
    time.sleep(0.5)
subprocess.Popen.__init__ = start_and_wait
"""
"""A machine on which the launcher does not run for a while after it has started a program."""


def test_no_process_of_a_hook_outlives_a_launcher_that_its_first_line_kills(tmp_path: Path) -> None:
    write(tmp_path, hooks__1_a_sh="kill -9 $PPID\ntrap '' TERM\nsleep 300 & wait\n")
    with cli.started("direct", "--", "tiny", cwd=tmp_path, before=BUSY, PLACE=str(tmp_path)) as process:
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    cli.wait_for(lambda: not list_processes("PLACE", str(tmp_path)), "the end of the hook")


def list_processes(name: str, value: str) -> list[psutil.Process]:
    """Processes that have a variable with this value."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [process] if process.environ().get(name) == value else []
    return found


LINGER = """
import time
from pathlib import Path
from msgspec import Struct

class Options(Struct):
    pass

def run(options, context):
    Path("ready").touch()
    time.sleep(30)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_task_without_workers_runs_its_failure_hook(tmp_path: Path, number: signal.Signals) -> None:
    write(
        tmp_path,
        plugins__tasks__linger_py=LINGER,
        hooks__linger__failure__1_f_sh='echo "$PRIMUS_OUTCOME $PRIMUS_EXIT_CODE $PRIMUS_REASON" >said\n',
    )
    plugins = str(tmp_path / "plugins")
    with cli.started("direct", "--", "linger", cwd=tmp_path, PRIMUS_PLUGINS=plugins) as process:
        cli.wait_for((tmp_path / "ready").exists, "the task to work")
        process.send_signal(number)
        process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert (tmp_path / "said").read_text() == f"interrupted {128 + number} {number.name}\n"


def test_a_hook_that_prints_secrets_shows_them_nowhere(tmp_path: Path) -> None:
    text = (
        "env\necho leaking $HF_TOKEN >&2\necho env.MADE_TOKEN=canary-made\necho env.COPY=$HF_TOKEN\n"
        "echo canary-made\necho leaking canary-made\n"
    )
    write(tmp_path, hooks__1_a_sh=text, hooks__2_b_sh='echo "$MADE_TOKEN $COPY"\nexit 1\n')
    done = launched(tmp_path, "--", "tiny", HF_TOKEN="canary-shell")
    assert done.returncode == 1
    assert "| <secret> <secret>" in done.stderr
    assert "canary" not in done.stdout + done.stderr + everything(tmp_path)
    write(tmp_path, hooks__2_b_sh='[ "$MADE_TOKEN$COPY" = canary-madecanary-shell ]\n')
    done = launched(tmp_path, "--", "tiny", HF_TOKEN="canary-shell")
    assert done.returncode == 0, "the values themselves arrive"
    assert "canary" not in done.stdout + done.stderr + everything(tmp_path)
    assert "COPY=<secret>  # hook:hooks/1_a.sh\n" in everything(tmp_path)


def test_a_setting_that_holds_a_secret_is_refused(tmp_path: Path) -> None:
    write(tmp_path, night_yaml=EXPERIMENT, hooks__1_a_sh="echo extra.train_data_path=/x/$HF_TOKEN\n")
    done = launched(tmp_path, "--", *TRAIN, HF_TOKEN="canary-shell")
    assert done.returncode == 1
    assert "hook hooks/1_a.sh: extra.train_data_path holds a secret" in done.stderr
    assert "canary" not in done.stderr + everything(tmp_path)


def test_a_secret_of_the_command_line_is_shown_nowhere_either(tmp_path: Path) -> None:
    write(tmp_path, night_yaml=EXPERIMENT, hooks__1_a_sh='echo "$@"\nexit 1\n')
    done = launched(tmp_path, "--", *TRAIN, "env.A_TOKEN=canary-typed", "--env.B_TOKEN", "canary-word")
    assert done.returncode == 1
    assert "canary" not in done.stdout + done.stderr + everything(tmp_path)


# -- after the workers --


def test_the_hooks_of_the_end_are_those_of_its_kind(tmp_path: Path) -> None:
    told = "echo $PRIMUS_OUTCOME $PRIMUS_EXIT_CODE $PRIMUS_REASON\n"
    write(tmp_path, hooks__after__1_a_sh=told, hooks__tiny__failure__1_b_sh=told)
    assert launched(tmp_path, "--", "tiny").returncode == 0
    assert "\ndone 0\n" in hook_log(tmp_path, "after_1_a.node_0")
    assert not list(latest(tmp_path).glob("logs/hooks/failure*"))
    assert launched(tmp_path, "--", "tiny", "exit").returncode == 1
    assert "\nfailed 1 rank 0 exited with code 7" in hook_log(tmp_path, "failure_1_b.node_0")
    assert not list(latest(tmp_path).glob("logs/hooks/after*"))


def test_a_failing_hook_of_the_end_leaves_the_outcome(tmp_path: Path) -> None:
    write(tmp_path, hooks__after__1_a_sh="echo extra.x=$HF_TOKEN\necho oh\nexit 5")
    done = launched(tmp_path, "--", "tiny", HF_TOKEN="canary")
    assert done.returncode == 0
    said = "primus-cli: hook hooks/after/1_a.sh failed: exit code 5\n  | extra.x=<secret>\n  | oh\n  log: "
    assert done.stderr.startswith(said)
    assert read(tmp_path, "metadata.json")["outcome"]["state"] == "done"
    last = json.loads((latest(tmp_path) / "events.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["node_rank"]) == ("hook_failed", 0)
    assert "exit code 5" in last["problem"]


# -- options --


def test_no_hooks_runs_none_and_a_dry_run_names_them(tmp_path: Path) -> None:
    write(tmp_path, hooks__1_a_once_sh="", hooks__after__2_b_py="", p_py="")
    (tmp_path / "hooks/1_a_once.sh").rename(tmp_path / "hooks/1_a.once.sh")
    shown = cli.run("--dry-run", "direct", "--patch", "p.py", "--", "tiny", cwd=tmp_path)
    assert (
        "hooks and patches, in this order:\n"
        "  before hook hooks/1_a.once.sh  # once, at most 600 s\n"
        "  before patch p.py  # each node, at most 600 s\n"
        "  after hook hooks/after/2_b.py  # each node, at most 600 s\n"
    ) in shown.stdout
    assert not (tmp_path / "out").exists()
    without = cli.run("--dry-run", "direct", "--no-hooks", "--", "tiny", cwd=tmp_path)
    assert "hooks/" not in without.stdout
    launched(tmp_path, "--no-hooks", "--", "tiny")
    assert not (latest(tmp_path) / "logs/hooks").exists()


def test_a_hook_that_asks_for_it_is_alone_on_its_node(tmp_path: Path) -> None:
    write(tmp_path, hooks__1_a_sh="# primus: lock, timeout=1\n")
    folder = tmp_path / f"tmp/primus-{os.getuid()}"
    folder.mkdir()
    with (folder / "hooks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = launched(tmp_path, "--", "tiny")
    assert refused.returncode == 1
    assert "timed out waiting for the lock of this node" in refused.stderr
    assert launched(tmp_path, "--", "tiny").returncode == 0


# -- the Python API --


def test_decorated_functions_set_and_stop(tmp_path: Path) -> None:
    write(
        tmp_path,
        night_yaml=EXPERIMENT,
        hooks__train__1_a_py=(
            "from primus.hook import HookContext, Settings, hook\n"
            "@hook\n"
            "def choose(context: HookContext) -> Settings:\n"
            "    print('env.SAID=1', context.task, context.words, context.config.name)\n"
            "    return Settings(env={'A': 1, 'B': True}, extra={'train_iters': 2})\n"
            "@hook(stage='after')\n"
            "def late(context: HookContext) -> None:\n"
            "    print(context.outcome, context.exit_code, context.run_directory.name)\n"
        ),
    )
    done = launched(tmp_path, "--", *TRAIN)
    assert done.returncode == 0, done.stderr
    env = read(tmp_path, "plan.json")["env"]
    assert (env["A"]["value"], env["B"]["value"]) == ("1", "true")
    assert "SAID" not in env, "functions return what they set"
    assert read(tmp_path, "config/origins.json")["train_iters"] == "hook: --train_iters"
    assert f"done 0 {latest(tmp_path).name}\n" in hook_log(tmp_path, "after_1_a.node_0")


@pytest.mark.parametrize(
    ("body", "problem", "line"),
    [
        ("raise Stop('no licence', 'buy one')", "it stopped the launch: no licence", "  | buy one\n"),
        ("return 3", "exit code 1", ": f returned int, not primus.hook.Settings or None; define f("),
        ("1 / 0", "exit code 1", "  | ZeroDivisionError: division by zero\n"),
        ("raise SystemExit(0)", "it exited before its functions returned", "log: "),
        ("return Settings(env={'A B': 1})", "", "'A B' is not a valid environment variable"),
    ],
)
def test_a_function_that_fails_stops_the_launch(tmp_path: Path, body: str, problem: str, line: str) -> None:
    write(
        tmp_path,
        hooks__1_a_py=f"from primus.hook import *\n@hook\ndef f(context):\n    {body}\n",
    )
    done = launched(tmp_path, "--", "tiny")
    assert done.returncode == 1
    assert done.stderr.startswith(f"primus-cli: hook hooks/1_a.py failed: {problem}" if problem else "primus-cli: hook")
    assert line in done.stderr


# -- tasks that are done in the launcher's process --


def test_functions_import_what_lies_beside_their_file_but_no_other_primus(tmp_path: Path) -> None:
    write(
        tmp_path,
        hooks___site_py="NAME = 'beside'\n",
        hooks__1_a_py="from primus.hook import *\nfrom _site import NAME\n@hook\n"
        "def f(context): return Settings(env={'SHOWN': NAME})\n",
        primus____init___py="raise SystemExit('another primus in the working folder')\n",
    )
    done = cli.run("direct", "--", "tiny", cwd=tmp_path, before="sys.path.remove('')")  # as the installed command
    assert done.returncode == 0, done.stderr
    assert "variable beside" in (latest(tmp_path) / "logs/rank_0.log").read_text()


def test_a_task_without_workers_has_its_own_hooks_around_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        hooks__1_all_sh="touch all",
        hooks__runs__list__0_a_sh="echo env.A_PATH=$A_PATH:/b\necho env.B=2\n",
        hooks__runs__list__1_a_sh="echo env.SEEN=1\necho extra.workspace=elsewhere\necho $@ > words\n",
        hooks__runs__list__after__1_b_sh="echo $PRIMUS_OUTCOME $SEEN $A_PATH $B > after",
        hooks__runs__list__failure__1_c_sh="echo $PRIMUS_OUTCOME > failure",
    )
    done = launched(tmp_path, "--", "runs", "list", A_PATH="/a", B="1")
    assert done.returncode == 0, done.stderr
    assert "elsewhere" in done.stdout
    assert not (tmp_path / "all").exists()
    assert (tmp_path / "after").read_text() == "done 1 /a:/b 1\n"
    typed = launched(tmp_path, "--", "runs", "list", "--workspace", "mine")
    assert "mine" in typed.stdout, "what was typed wins"
    write(tmp_path, hooks__runs__list__1_a_sh="echo extra.work=1")
    refused = launched(tmp_path, "--", "runs", "list")
    assert refused.returncode == 2
    assert "hook hooks/runs/list/1_a.sh: task 'runs list': unknown option --work" in refused.stderr
    assert (tmp_path / "failure").read_text() == "failed\n"


# -- patches --


def test_patches_run_after_hooks_and_are_recorded(tmp_path: Path) -> None:
    write(tmp_path, hooks__1_a_sh="echo hook >> order", a_sh="echo a >> order\nexit 2", b_py="print('env.B=2')")
    done = launched(tmp_path, "--patch", "a.sh", "--patch", "b.py", "--", "tiny")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "order").read_text() == "hook\na\n"
    assert "patch a.sh does not apply\n" in done.stdout
    records = read(tmp_path, "env/patches.json")
    assert [(each["file"], each["state"], each["exit_code"]) for each in records] == [
        ("a.sh", "skipped", 2),
        ("b.py", "applied", 0),
    ]
    assert (latest(tmp_path) / "env/patches/0_a.sh").read_text() == "echo a >> order\nexit 2"


def test_a_patch_that_fails_in_the_middle_stops_the_launch(tmp_path: Path) -> None:
    write(tmp_path, a_sh="touch half\nset -e\nfalse\ntouch whole", b_sh="touch never")
    done = launched(tmp_path, "--patch", "a.sh", "b.sh", "--", "tiny")
    assert done.returncode == 1
    assert done.stderr.startswith("primus-cli: patch a.sh failed: exit code 1\n")
    assert (tmp_path / "half").exists()
    assert not (tmp_path / "whole").exists()
    assert not (tmp_path / "never").exists()
    assert [each["state"] for each in read(tmp_path, "env/patches.json")] == ["failed"]


@pytest.mark.parametrize("file", ["absent.sh", "notes.txt", "."])
def test_what_is_no_patch_file_is_a_usage_error(tmp_path: Path, file: str) -> None:
    write(tmp_path, a_sh="")
    (tmp_path / "notes.txt").touch()
    done = launched(tmp_path, "--patch", "a.sh", file, "--", "tiny")
    assert done.returncode == 2
    assert done.stderr.startswith(f"primus-cli: --patch {file}: ")
    assert not (tmp_path / "out").exists()


def test_a_replay_applies_the_patches_of_the_run(tmp_path: Path) -> None:
    write(tmp_path, night_yaml=EXPERIMENT, a_sh="echo patched\n", other_sh="echo other\n")
    assert launched(tmp_path, "--patch", "a.sh", "--", *TRAIN).returncode == 0
    first = latest(tmp_path)
    (tmp_path / "a.sh").write_text("changed since\n")
    replay = ("--", "train", "pretrain", "--replay", str(first))
    for _ in range(2):  # and a replay of the replay
        done = launched(tmp_path, "--", "train", "pretrain", "--replay", str(latest(tmp_path)))
        assert done.returncode == 0, done.stderr
        assert "\npatched\n" in hook_log(tmp_path, "patch_0_a.node_0")
        assert [each["name"] for each in read(tmp_path, "env/patches.json")] == ["0_a.sh"]
    refused = launched(tmp_path, "--patch", "other.sh", *replay)
    assert refused.returncode == 3
    assert "patch files: a.sh " in refused.stderr
    assert launched(tmp_path, "--patch", "other.sh", *replay, "--force").returncode == 0
    (first / "env/patches/0_a.sh").write_text("echo evil\n")
    damaged = launched(tmp_path, *replay)
    assert damaged.returncode == 1
    assert "env/patches/0_a.sh: damaged: it differs from the patch that the run used" in damaged.stderr


def test_no_copy_of_a_patch_has_secrets_of_hooks_or_its_own(tmp_path: Path) -> None:
    own = "export HF_TOKEN=canary-own A=1; B_KEY='canary-more'\nexport D_KEY=$B_KEY\n"
    patch = f"# canary-hook\n{own}echo env.C_KEY=canary-last\n"
    write(tmp_path, hooks__1_a_sh="echo env.MY_TOKEN=canary-hook\n", a_sh=patch)
    done = launched(tmp_path, "--patch", "a.sh", "--", "tiny")
    assert done.returncode == 0, done.stderr
    assert "canary" not in everything(tmp_path) + done.stdout
    copy = (latest(tmp_path) / "env/patches/0_a.sh").read_text()
    assert "export HF_TOKEN=<secret> A=1; B_KEY='<secret>'\n" in copy
    assert "export D_KEY=$B_KEY\n" in copy


def test_a_secret_in_a_patch_is_not_recorded_and_its_replay_asks_for_the_file(tmp_path: Path) -> None:
    write(tmp_path, night_yaml=EXPERIMENT, a_sh="echo canary-shell\n")
    assert launched(tmp_path, "--patch", "a.sh", "--", *TRAIN, HF_TOKEN="canary-shell").returncode == 0
    assert "canary" not in everything(tmp_path)
    first = latest(tmp_path)
    refused = launched(tmp_path, "--", "train", "pretrain", "--replay", str(first))
    assert refused.returncode == 2
    assert "the copy of patch a.sh in the run folder lacks a secret" in refused.stderr
    given = launched(tmp_path, "--patch", "a.sh", "--", "train", "pretrain", "--replay", str(first))
    assert given.returncode == 0, given.stderr


# -- several nodes --


def both(
    folders: tuple[Path, Path], port: int, *task: str, options: tuple[str, ...] = (), **env: str
) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of node 0 and node 1; both are here, whatever is said about that."""
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
    nodes = ("direct", "--nproc", "1", *place, *options)
    with ExitStack() as stack:
        started = [
            stack.enter_context(cli.started(*nodes, "--node-rank", str(rank), "--", *task, cwd=folders[rank], **env))
            for rank in (0, 1)
        ]
        outputs = [node.communicate(timeout=60) for node in started]
    said = [
        (out, re.sub(r"primus-cli: warning: the route to the master uses lo.*\n", "", errors))
        for out, errors in outputs
    ]
    return [(node.returncode, out, errors) for node, (out, errors) in zip(started, said, strict=True)]


def two_folders(tmp_path: Path, first: dict[str, str], second: dict[str, str]) -> tuple[Path, Path]:
    folders = (tmp_path / "a", tmp_path / "b")
    for folder, files in zip(folders, (first, second), strict=True):
        write(folder, night_yaml=EXPERIMENT, **files)
    return folders


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_hook_of_one_node_ends_all_at_once(tmp_path: Path, port: int, failing: int) -> None:
    files = [{"hooks__1_a_sh": "echo fine"}, {"hooks__1_a_sh": "echo fine"}]
    files[failing] = {"hooks__1_a_sh": "echo broken\nexit 4"}
    begun = time.monotonic()
    results = both(two_folders(tmp_path, *files), port, "tiny")
    assert time.monotonic() - begun < 15
    assert [code for code, _, _ in results] == [1, 1]
    own, other = results[failing][2], results[1 - failing][2]
    assert own.startswith("primus-cli: hook hooks/1_a.sh failed: exit code 4\n  | broken\n  log: ")
    log = Path(re.findall(r"log: (.*)", own)[0])
    assert "broken" in log.read_text(), "the log is where the message says"
    assert other == f"primus-cli: node {failing} ({socket.gethostname()}): hook hooks/1_a.sh failed: exit code 4\n"
    outcome = read(tmp_path / "a", "metadata.json")["outcome"]
    assert outcome["state"] == "failed"
    assert "hook hooks/1_a.sh failed: exit code 4" in outcome["reason"]


def test_a_node_that_comes_after_another_has_failed_is_told_at_once(port: int) -> None:
    told: list[str] = []

    def lead() -> None:
        try:
            rendezvous.lead_rendezvous(port, 3, rendezvous.JoinReply("run", 0), "same", 20)
        except rendezvous.NodeFailed as error:
            told.append(f"{error.exit_code} {error.problem}")

    head = threading.Thread(target=lead)
    head.start()
    rendezvous.abort_join(rendezvous.HeadAddress("localhost", port), 1, "node 1: no", 3, 10)
    with pytest.raises(rendezvous.NodeFailed, match="node 1: no") as caught:
        rendezvous.join_rendezvous(rendezvous.HeadAddress("localhost", port), 2, "same", 10)
    head.join(timeout=10)
    assert not head.is_alive(), "it stays no longer than the last node"
    assert (caught.value.exit_code, told) == (3, ["3 node 1: no"])


def test_node_0_waits_only_so_long_to_tell_that_it_failed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "ABORT_REPLY_S", 0.3)
    begun = time.monotonic()
    rendezvous.abort_rendezvous(port, 2, "no", 1)
    assert time.monotonic() - begun < 5


@pytest.mark.native
def test_every_node_records_how_its_patches_ended(tmp_path: Path, port: int) -> None:
    folders = two_folders(tmp_path, {"p_sh": "exit $((2 * PRIMUS_NODE_RANK))"}, {"p_sh": "exit 2"})
    results = both(folders, port, "tiny", options=("--patch", "p.sh"))
    assert [(code, errors) for code, _, errors in results] == [(0, ""), (0, "")]
    assert [each["state"] for each in read(folders[0], "env/patches.json")] == ["applied"]
    assert [each["state"] for each in read(folders[1], "env/node_1/patches.json")] == ["skipped"]


@pytest.mark.native
def test_what_is_set_once_holds_on_all_nodes(tmp_path: Path, port: int) -> None:
    once = {
        "hooks__1_a_sh": "# primus: once\necho once >> count\necho env.SHOWN=all\necho env.A_TOKEN=canary\n",
        "hooks__2_b_sh": "echo env.MINE=$PRIMUS_NODE_RANK\n",
    }
    folders = two_folders(tmp_path, once, once)
    results = both(folders, port, "tiny")
    assert [(code, errors) for code, _, errors in results] == [(0, ""), (0, "")]
    assert "A_TOKEN: a secret is not sent to other nodes" in results[0][1]
    assert (folders[0] / "count").exists()
    assert not (folders[1] / "count").exists()
    for folder in folders:
        log = next(folder.glob("out/tiny/latest/logs/rank_*.log"))
        assert "variable all\n" in log.read_text()
    dump = (latest(folders[1]) / "env/node_1/primus_env_dump.txt").read_text()
    assert "SHOWN=all  # hook:hooks/1_a.sh\n" in dump
    assert "MINE=1  # hook:hooks/2_b.sh\n" in dump
    assert "A_TOKEN" not in dump
    assert (latest(folders[1]) / "logs/hooks/before_2_b.node_1.log").exists()


def test_nodes_whose_hooks_settle_differently_start_nothing(tmp_path: Path, port: int) -> None:
    folders = two_folders(
        tmp_path, {"hooks__1_a_sh": "echo extra.train_iters=2"}, {"hooks__1_a_sh": "echo extra.train_iters=1"}
    )
    results = both(folders, port, *TRAIN)
    assert [code for code, _, _ in results] == [2, 2]
    assert "node 1 was started with another configuration" in results[0][2]


def test_a_hook_file_runs_by_itself(tmp_path: Path) -> None:
    """What an author does to try one."""
    write(
        tmp_path, h_py="from primus.hook import hook, Settings\n@hook\ndef f(c): return Settings(env={'A': c.nproc})\n"
    )
    told = {
        "TASK": "t",
        "HOOK_STAGE": "before",
        "NODE_RANK": "0",
        "NNODES": "1",
        "NPROC": "4",
        "HOOK_RESULT": "out.json",
    }
    env = cli.environment(**{f"PRIMUS_{name}": value for name, value in told.items()})
    argv = [sys.executable, "-m", "primus.hook", "h.py", "f", "word"]
    assert subprocess.run(argv, cwd=tmp_path, env=env, check=False).returncode == 0
    assert json.loads((tmp_path / "out.json").read_text())["env"] == {"A": "4"}
