"""Secrets of every kind in every place where a user can put one: none is found in any byte that is written.

Each place has a secret of its own, so that a failure names the place. All bytes below the working folder are read back
but for the user's own inputs, and all that the commands print.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import cli, clients

SHELL = {
    "HF_TOKEN": "cnry.shell.token",
    "DB_PASS": "cnry'with\"quotes$and`ticks",
    "MYSQL_PWD": "cnry ünïcödé пароль 密码",
    "PASSPHRASE": "cnry correct horse battery staple that is folded over several lines by YAML",
    "SIGNING_KEY": "-----BEGIN PRIVATE KEY-----\ncnryFirstLineOfKey/+=\ncnrySecondLineOfKey==\n-----END KEY-----",
    "CARD_PIN": "cnry42",
    "WANDB_API_KEY2": "cnry%2Fescaped+value/with=signs&more",
    "SLURM_JWT": "eyJhbGciOiJIUzI1NiJ9.cnryjwtpayload.cnrysignature",
    "SENTRY": "https://cnrylonetoken@sentry.example/1",
    "PROXY": "http://ann:cnry@p@ss/word@proxy:3128",
    "STORE": "https://a.blob.example/c?sv=2024&sig=cnrysignature%3D&se=2027",
    "CONN": "Server=db;Uid=me;Password=cnryOfConnection;Encrypt=yes",
    "SERVICE": '{"client_id": "x", "private_key": "cnry-of-json"}',
    "ODDLY_NAMED": "hf_cnryABCDEFGH12345678",
    "CLOUD": "AKIACNRYABCDEFGHIJKL",
    "BACKSLASHED": "x",
    "WEBHOOK": "cnry\\n123456\\backslashes",
}
EXPERIMENT = """\
workspace: output
exp_name: night
env:
  INNOCENT: ${HF_TOKEN}
  PART: prefix-${DB_PASS}-suffix
  MY_API_KEY: cnry-of-the-file
  DATABASE: postgres://me:cnry-of-the-url@host/db
  FOLDED: "${PASSPHRASE}"
modules:
  pre_trainer:
    framework: blabber
    model: tiny
    overrides:
      mock_data: true
      seq_length: 8
      train_iters: 3
      mlflow_tracking_uri: https://me:cnry-of-the-tracker@mlflow.example
      backend_args: {registry_token: cnry-of-a-backend, nested: {password: cnry-nested}, copied: "${HF_TOKEN}"}
"""
HOOK = "echo env.SET_TOKEN=cnry-of-a-hook\necho it says cnry-of-a-hook\nenv\nenv >&2\necho env.PLAIN_COPY=$HF_TOKEN\n"
PATCH = "export A_TOKEN=cnry-of-a-patch\necho $HF_TOKEN $A_TOKEN\nenv\n"
LAUNCHER = "direct:\n  env: {LAUNCHER_TOKEN: cnry-of-the-launcher, COPY_TWO: cnry.shell.token}\n"
OPTIONS = (
    "--env",
    "TYPED_TOKEN=cnry-typed",
    "--env=DSN=mysql://me:cnry-dsn@h/d",
    "--env-file",
    "more.env",
    "--env",
    "HF_TOKEN",
)
OPTIONS += ("--env", f"COPIED={SHELL['HF_TOKEN']}")
TASK = ("train", "pretrain", "--config", "night.yaml", "env.OVER_TOKEN=cnry-override", "--env.LATE_SECRET", "cnry-late")
INPUTS = ("night.yaml", "more.env", "launcher.yaml", "hooks", "patch.sh", "bin")


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    (tmp_path / "more.env").write_text("FILE_PASSWORD='cnry-of-a-file'\nexport COPY_OF_IT=cnry-of-a-file\n")
    (tmp_path / "launcher.yaml").write_text(LAUNCHER)
    (tmp_path / "patch.sh").write_text(PATCH)
    hooks = tmp_path / "hooks" / "train" / "pretrain"
    (hooks / "after").mkdir(parents=True)
    (hooks / "1_set.sh").write_text(HOOK)
    (hooks / "after" / "1_look.sh").write_text("env\n")
    return tmp_path


def run(workplace: Path, *words: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
    home = {"HOME": str(workplace / "home"), "XDG_STATE_HOME": str(workplace / "state")}
    return cli.run(*words, cwd=workplace, timeout_s=timeout_s, **SHELL, **home)


def written(workplace: Path) -> Iterator[tuple[str, bytes]]:
    for path in workplace.rglob("*"):
        relative = path.relative_to(workplace)
        if path.is_file() and not path.is_symlink() and relative.parts[0] not in INPUTS:
            yield str(relative), path.read_bytes()


def check(workplace: Path, *said: subprocess.CompletedProcess[str]) -> None:
    """No byte of a secret is there, as it is or encoded."""
    texts = [(f"output of {each.args}", (each.stdout + each.stderr).encode()) for each in said]
    for place, content in [*texts, *written(workplace)]:
        lowered = content.lower()
        for core in (b"cnry", "пароль".encode(), b"battery", "密码".encode(), b"\\u0430\\u0440\\u043e"):
            at = lowered.find(core)
            assert at < 0, f"{place}: ...{content[max(0, at - 80) : at + 40]!r}..."
        for encoded in (base64.b64encode(b"user:" + SHELL["HF_TOKEN"].encode())[8:-4], b"636e7279"):
            assert encoded not in content, f"{place}: {encoded!r}"
        assert urllib.parse.quote("пароль").encode() not in content, place


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_a_run_writes_no_secret_whatever_its_processes_print(workplace: Path, fails: bool) -> None:
    extra = ("backend_args.fails=true",) if fails else ()

    done = run(workplace, "--config", "launcher.yaml", "direct", "--patch", "patch.sh", *OPTIONS, "--", *TASK, *extra)
    assert done.returncode == (1 if fails else 0), done.stdout + done.stderr
    check(workplace, done)
    folder = workplace / "output/night/latest"
    log = (folder / "logs/attempt_0/rank_0.log").read_text()
    assert log.count("<secret>") > 20, "the worker had them, and wrote them"
    dump = "\n" + (folder / "env/primus_env_dump.txt").read_text()
    for name in (
        "HF_TOKEN",
        "INNOCENT",
        "SET_TOKEN",
        "TYPED_TOKEN",
        "FILE_PASSWORD",
        "COPIED",
        "OVER_TOKEN",
        "PLAIN_COPY",
    ):
        assert f"\n{name}=<secret>" in dump, name
    assert "\nPART=prefix-<secret>-suffix" in dump, "the rest of a value is shown"
    for path in folder.rglob("*.json"):
        json.loads(path.read_text())
    for line in (folder / "events.jsonl").read_text().splitlines():
        json.loads(line)


def test_looking_at_a_run_shows_no_secret(workplace: Path) -> None:
    first = run(workplace, "direct", *OPTIONS, "--", *TASK)
    assert first.returncode == 0, first.stderr
    looks = [
        run(workplace, *form, "direct", *options, "--", *words)
        for form in ((), ("--json",))
        for options, words in (
            ((), ("runs", "show", "night")),
            ((), ("runs", "diff", "night", "night")),
            ((), ("runs", "list")),
            ((), ("diagnose", "night")),
            ((), ("config", "show", *TASK[2:])),
            ((), ("config", "check", *TASK[2:])),
            (OPTIONS, ("env", "show", "--config", "night.yaml")),
            (OPTIONS, ("env", "report")),
        )
    ]
    assert [(each.args, each.stderr) for each in looks if "Traceback" in each.stderr] == []
    check(workplace, *looks)


def test_settings_that_hold_secrets_are_given_again_to_a_run_that_is_continued(workplace: Path) -> None:
    assert run(workplace, "direct", *OPTIONS, "--", *TASK).returncode == 0
    folder = str(workplace / "output/night/latest")
    refused = run(workplace, "direct", "--", "train", "pretrain", "--replay", folder)
    assert refused.returncode == 2
    assert "export PRIMUS_SECRET_SETTINGS=" in refused.stderr
    settings = {"mlflow_tracking_uri": "https://me:cnry-of-the-tracker@mlflow.example", "backend_args": {"a": 1}}
    home = {"HOME": str(workplace / "home"), "PRIMUS_SECRET_SETTINGS": json.dumps(settings)}
    words = ("direct", "--", "train", "pretrain", "--replay", folder)
    again = cli.run(*words, cwd=workplace, timeout_s=90, **SHELL, **home)
    assert again.returncode == 0, again.stderr
    check(workplace, refused, again)


def test_a_hook_gets_no_secret_in_its_arguments(workplace: Path) -> None:
    hook = workplace / "hooks" / "train" / "pretrain" / "1_set.sh"
    hook.write_text('echo "arguments: $*"\ncat /proc/$$/cmdline | tr "\\0" " " > "$PRIMUS_RUN_DIR/arguments"\n')
    setting = ("--mlflow_tracking_uri", "https://ann:cnry-typed@mlflow.example")
    done = run(workplace, "direct", "--", *TASK[:4], *setting)
    assert done.returncode == 0, done.stderr
    arguments = (workplace / "output/night/latest/arguments").read_text()
    assert "--mlflow_tracking_uri https://ann:<secret>@mlflow.example" in arguments
    check(workplace, done)


CHAINS = {
    "direct": ("direct", *OPTIONS),
    "docker": ("container", "--engine", "docker", "--image", "x:1", "--", "direct", *OPTIONS),
    "apptainer": ("container", "--engine", "apptainer", "--image", "./x.sif", "--", "direct", *OPTIONS),
    "sbatch": ("slurm", "sbatch", "-N", "1", "--", "direct", *OPTIONS),
    "srun": ("slurm", "srun", "-N", "1", "--", "direct", *OPTIONS),
    "ssh": ("ssh", "--hosts", "localhost", "--", "direct", *OPTIONS),
    "kubernetes": ("kubernetes", "create", "--replica", "2", "--image", "x:1", *OPTIONS[:3], "--env", OPTIONS[-1]),
}


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_dry_run_shows_no_secret(workplace: Path, chain: tuple[str, ...], form: tuple[str, ...]) -> None:
    (workplace / "x.sif").touch()
    shown = run(workplace, "--dry-run", *form, *chain, "--", *TASK[:4])
    assert shown.returncode == 0, shown.stderr
    check(workplace, shown)


@pytest.mark.parametrize("name", ["docker", "apptainer", "sbatch", "srun", "ssh"])
def test_programs_of_other_runtimes_get_no_secret_in_words_or_scripts(workplace: Path, name: str) -> None:
    clients.install(workplace / "bin")
    (workplace / "records").mkdir()
    (workplace / "x.sif").touch()
    path = {"PATH": f"{workplace / 'bin'}:{os.environ['PATH']}", "RECORDS": str(workplace / "records")}
    home = {"HOME": str(workplace / "home"), "XDG_STATE_HOME": str(workplace / "state")}
    words = (*CHAINS[name], "--", *TASK[:4])
    done = cli.run(*words, cwd=workplace, timeout_s=120, **SHELL, **path, **home)
    assert done.returncode == 0, done.stdout + done.stderr
    check(workplace, done)


@pytest.mark.parametrize(
    "words",
    [
        ("direct", "--", *TASK, "--lr", SHELL["HF_TOKEN"]),
        ("direct", "--", *TASK, "--exp_name", SHELL["HF_TOKEN"]),
        ("direct", "--", *TASK, "--data_path_x", "https://u:cnry-typed@h/"),
        ("direct", "--", *TASK[:3], f"missing-{SHELL['HF_TOKEN']}.yaml"),
        ("direct", "--env", f"9X={SHELL['HF_TOKEN']}", "--", *TASK),
        ("direct", f"--typo={SHELL['HF_TOKEN']}", "--", *TASK),
        (f"{SHELL['HF_TOKEN']}", "--", *TASK),
        ("direct", "--", "runs", "show", SHELL["DB_PASS"]),
        ("direct", "--", "train", "pretrain", "--config", "wrong.yaml"),
        ("--debug", "direct", "--", "train", "pretrain", "--config", "wrong.yaml"),
        ("slurm", "sbatch", f"--comment={SHELL['HF_TOKEN']}", "--", *TASK),
        ("container", "--image", "x:1", "--label", f"x={SHELL['HF_TOKEN']}", "--", *TASK),
    ],
)
def test_an_error_shows_no_secret(workplace: Path, words: tuple[str, ...]) -> None:
    wrong = EXPERIMENT.replace("train_iters: 3", "train_iters: ${CARD_PIN}\n      lr: ${PASSPHRASE}")
    (workplace / "wrong.yaml").write_text(wrong)
    failed = run(workplace, *words)
    assert failed.returncode != 0
    (workplace / "wrong.yaml").unlink()
    check(workplace, failed)
