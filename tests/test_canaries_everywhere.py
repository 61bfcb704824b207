"""No runtime lets a secret be seen: not in programs' words, scripts, manifests, logs, run folders, or what is said."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from fakes import cli, clients

EXPERIMENT = """\
exp_name: night
env: {MY_API_KEY: canary-of-the-file}
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 3}}}
"""
SHELL = {"HF_TOKEN": "canary-of-the-shell", "WANDB_API_KEY": "canary-2", "HTTPS_PROXY": "http://me:canary-3@proxy:1"}
TRAIN = ("train", "pretrain", "--config", "night.yaml")
ENV = ("--env", "A_TOKEN=canary-4", "--env=DSN=postgres://me:canary-5@host/db", "--env", "secrets.env")
CHAINS = {
    "docker": ("container", "--engine", "docker", "--image", "x:1", *ENV),
    "podman": ("container", "--engine", "podman", "--image", "x:1", "--", "direct", *ENV),
    "apptainer": ("container", "--engine", "apptainer", "--image", "x.sif", *ENV),
    "srun": ("slurm", "srun", "-N", "1", "--", "direct", *ENV),
    "sbatch": ("slurm", "sbatch", "-N", "1", "--requeue", "--", "direct", *ENV),
    "sbatch, docker": ("slurm", "sbatch", "-N", "1", "--", "container", "--engine", "docker", "--image", "x:1", *ENV),
    "ssh": ("ssh", "--hosts", "localhost", "--", "direct", *ENV),
    "ssh, podman": ("ssh", "--hosts", "localhost", "--", "container", "--engine", "podman", "--image", "x:1", *ENV),
}

POD = ("kubernetes", "create", "--replica", "2", "--image", "x:1", "--hf_token", "canary-7", *ENV[:3])
SERVERS = {
    "jobset": POD,
    "trainjob": (*POD, "--target", "trainjob"),
    "safe": (*POD, "--url", "http://127.0.0.1:1", "--workspace", "w"),
}
"""What is sent to a server; tests/runtimes has servers that look at what comes."""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    clients.install(tmp_path / "bin")
    (tmp_path / "records").mkdir()
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    (tmp_path / "secrets.env").write_text("MLFLOW_TRACKING_PASSWORD=canary-6\n")
    (tmp_path / "x.sif").touch()
    return tmp_path


def environment(workplace: Path) -> dict[str, str]:
    path = f"{workplace / 'bin'}:{os.environ['PATH']}"
    home = {"HOME": str(workplace / "home"), "XDG_STATE_HOME": str(workplace / "state")}
    return {"PATH": path, "RECORDS": str(workplace / "records"), **home, **SHELL}


def left_behind(workplace: Path) -> str:
    inputs = {workplace / "night.yaml", workplace / "secrets.env"}
    files = [path for path in workplace.rglob("*") if path.is_file() and path not in inputs]
    return "".join(path.read_text(errors="replace") for path in files)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_training_run_tells_no_secret_and_has_them_all(chain: tuple[str, ...], workplace: Path) -> None:
    done = cli.run(*chain, "--", *TRAIN, cwd=workplace, timeout_s=90, **environment(workplace))
    assert done.returncode == 0, done.stdout + done.stderr
    text = left_behind(workplace)
    assert "canary" not in text + done.stdout + done.stderr
    dump = "\n" + (workplace / "output/night/latest/env/primus_env_dump.txt").read_text()
    for name in ("HF_TOKEN", "WANDB_API_KEY", "A_TOKEN", "DSN", "MLFLOW_TRACKING_PASSWORD", "MY_API_KEY"):
        assert f"\n{name}=<secret>" in dump, f"{name} has arrived"
    assert any((workplace / "records").iterdir()), "the clients were called"


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("chain", [*CHAINS.values(), *SERVERS.values()], ids=[*CHAINS, *SERVERS])
def test_a_dry_run_tells_none_and_calls_nobody(chain: tuple[str, ...], form: tuple[str, ...], workplace: Path) -> None:
    done = cli.run("--dry-run", *form, *chain, "--", *TRAIN, cwd=workplace, **environment(workplace))
    assert done.returncode == 0, done.stderr
    assert "canary" not in done.stdout + done.stderr
    assert not list((workplace / "records").iterdir())
    assert not (workplace / "output").exists()


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_an_error_tells_none(chain: tuple[str, ...], workplace: Path) -> None:
    for name in clients.NAMES:
        (workplace / "bin" / name).write_text('#!/bin/sh\necho "$0: no such thing: $A_TOKEN" >&2\nexit 125\n')
    done = cli.run(*chain, "--", *TRAIN, cwd=workplace, **environment(workplace))
    assert done.returncode != 0
    said = done.stderr.replace("no such thing: canary-4", "")  # what a program says of itself is its own
    assert "canary" not in done.stdout + said + left_behind(workplace).replace("no such thing: canary-4", "")
    assert "Traceback" not in done.stderr


UNKNOWN = {
    "LDAP_BINDING": "canary ldap",
    "FTP_LOGIN_LINE": "machine h login ann password canary",
    "TEAM_BLOB": '{"type": "service", "id": "canary"}',
    "VAULT_ROLE": "canary\nof two lines",
    "REGISTRYPW": "canary9",
}
"""Variables of the shell whose names and values nobody knows to be secret."""


@pytest.mark.parametrize("chain", [("direct",), CHAINS["docker"], CHAINS["ssh"]], ids=["direct", "docker", "ssh"])
def test_what_the_shell_happens_to_have_is_written_as_fingerprints(chain: tuple[str, ...], workplace: Path) -> None:
    words = (*chain, "--env", "LDAP_BINDING", "--env", "SAID=as typed", "--", *TRAIN)
    environ = {**environment(workplace), **UNKNOWN, "NCCL_DEBUG": "WARN"}
    done = cli.run(*words, cwd=workplace, timeout_s=90, **environ)
    assert done.returncode == 0, done.stderr
    shown = cli.run("--dry-run", *words, cwd=workplace, **environ)
    assert shown.returncode == 0, shown.stderr
    folder = workplace / "output/night/latest"
    assert "canary" not in left_behind(workplace) + done.stdout + done.stderr + shown.stdout + shown.stderr
    dump = "\n" + (folder / "env/primus_env_dump.txt").read_text()
    assert "\nNCCL_DEBUG=WARN  # " in dump
    assert "\nSAID=as typed  # --env" in dump
    for name in {"LDAP_BINDING"} if "ssh" in chain else UNKNOWN:  # ssh passes on what a run reads, and what is named
        assert re.search(rf"\n{name}=(<hidden \w{{4}}-\w{{10}}>|<secret>)  # (shell|--env)\n", dump), name
    hidden = re.search(r"\nLDAP_BINDING=(.*)  # --env", dump)
    assert hidden
    if chain == ("direct",):
        assert json.loads((folder / "plan.json").read_text())["env"]["LDAP_BINDING"]["value"] == hidden[1]
        assert f"LDAP_BINDING={hidden[1]}" in (folder / "logs/launch.log").read_text()
        assert f"LDAP_BINDING={hidden[1]}" in shown.stdout, "the key of the fingerprints is kept"


def test_a_manifest_holds_no_value_of_the_shell_that_is_not_known_to_be_harmless(workplace: Path) -> None:
    words = ("--env", "VAULT_ROLE", "--env", "NCCL_DEBUG", "--env", "SAID=as typed")
    environ = {**environment(workplace), **UNKNOWN, "NCCL_DEBUG": "WARN"}
    shown = cli.run("--dry-run", *POD[:6], *words, "--", *TRAIN, cwd=workplace, **environ)
    assert shown.returncode == 0, shown.stderr
    assert "canary" not in shown.stdout
    assert re.search(r"name: NCCL_DEBUG\s+\|? *value: \"?WARN", shown.stdout)
    assert re.search(r"name: SAID\s+\|? *value: \"?as typed", shown.stdout)
    assert re.search(r"name: VAULT_ROLE\s+\|? *valueFrom:", shown.stdout)
