"""Default options from launcher files stand below what is typed, and what means nothing is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes import cli
from primus.errors import UsageError
from primus.launch import launcher_file
from primus.launch.command import Command, parse_command
from primus.launch.launcher_file import LauncherFileChoice


def applied(words: str, text: str, tmp_path: Path, *, over: str | None = None) -> Command:
    """The command `words` with the user's file `text`, and the file `over` of --config."""
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / ".primus.yaml").write_text(text)
    if over is not None:
        (tmp_path / "over.yaml").write_text(over)
    choice = LauncherFileChoice(given=str(tmp_path / "over.yaml") if over is not None else None)
    return launcher_file.apply_defaults(
        parse_command(words.split()), choice, {"HOME": str(tmp_path / "home"), "TEAM": "us"}
    )


def runtimes(*arguments: Any, **more: Any) -> dict[str, tuple[str, ...]]:
    return {segment.name: segment.words for segment in applied(*arguments, **more).request.runtimes}


def test_defaults_stand_before_what_is_typed(tmp_path: Path) -> None:
    text = "direct: {nproc: 4, env: {A: 1e-3, B: 'x y'}, no_hooks: true}"
    words = runtimes("direct --master-port 5 -- runs list", text, tmp_path)["direct"]
    assert words == ("--nproc=4", "--env=A=1e-3", "--env=B=x y", "--no-hooks", "--master-port", "5")


def test_a_site_has_each_new_training_checked(tmp_path: Path) -> None:
    text = "main: {check_layout: true}"
    assert applied("slurm -N 2 -- train pretrain --config f.yaml", text, tmp_path).request.words == (
        *("--check", "layout"),
        *("--config", "f.yaml"),
    )
    for words in ("train pretrain --config f.yaml --check off", "train pretrain --run x", "runs list"):
        assert "layout" not in applied(f"direct -- {words}", text, tmp_path).request.words


def test_what_is_typed_wins_under_each_of_its_names(tmp_path: Path) -> None:
    text = "direct: {nproc: 4}\nslurm: {nodes: 2, partition: gpu}"
    for typed in ("--nproc 2", "--nproc=2", "--nproc_per_node 2"):
        assert "--nproc=4" not in runtimes(f"direct {typed} -- runs list", text, tmp_path)["direct"]
    for typed in ("-N 8", "-N8", "--nodes=8"):
        words = runtimes(f"slurm srun {typed} -- runs list", text, tmp_path)["slurm"]
        assert words == ("srun", "--partition=gpu", *typed.split())


def test_options_that_may_be_repeated_add_up(tmp_path: Path) -> None:
    text = "container: {options: {image: mine, device: [/dev/kfd, /dev/dri], cap-add: [SYS_PTRACE], volume: [/data]}}"
    words = runtimes("container --device /dev/x -v /home -- runs list", text, tmp_path)["container"]
    assert words[:4] == ("--image=mine", "--device=/dev/kfd", "--device=/dev/dri", "--cap-add=SYS_PTRACE")
    assert words[-4:] == ("--device", "/dev/x", "-v", "/home")
    assert len(words) == 9


def test_the_file_of_config_is_merged_over_the_users(tmp_path: Path) -> None:
    text = (
        "slurm:\n  partition: gpu   # ours\n  time: 72:00:00\n  exclusive: true\n  comment: ${TEAM} and ${NONE:more}\n"
    )
    over = "slurm: {partition: big, exclusive: false, nodelist: [a, b], comment: null}"
    words = runtimes("slurm -- runs list", text, tmp_path, over=over)["slurm"]
    assert words == ("--partition=big", "--time=72:00:00", "--nodelist=a,b")
    assert "--comment=us and more" in runtimes("slurm -- runs list", text, tmp_path)["slurm"]


def test_the_end_of_the_chain_has_its_defaults_where_it_is_not_typed(tmp_path: Path) -> None:
    assert runtimes("slurm -- runs list", "direct: {nproc: 4}", tmp_path) == {"slurm": (), "direct": ("--nproc=4",)}


def test_a_command_gets_the_options_that_it_takes(tmp_path: Path) -> None:
    text = "kubernetes: {url: 'http://h', workspace: ws, cpu: 4, tail: 5}"
    assert runtimes("kubernetes list", text, tmp_path)["kubernetes"] == ("list", "--url=http://h", "--workspace=ws")
    words = runtimes("kubernetes create -- runs list", text, tmp_path)["kubernetes"]
    assert words == ("create", "--url=http://h", "--workspace=ws", "--cpu=4")


def test_a_section_may_have_the_short_name_of_its_runtime_and_a_file_may_hold_none(tmp_path: Path) -> None:
    assert "--cpu=4" in runtimes("k8s create -- runs list", "k8s: {cpu: 4}", tmp_path)["kubernetes"]
    for text in ("", "# nothing yet\n"):
        assert runtimes("direct -- runs list", text, tmp_path, over=text) == {"direct": ()}


def test_the_dead_key_of_the_existing_system_lives(tmp_path: Path) -> None:
    assert runtimes("direct -- runs list", "direct: {gpus_per_node: 4}", tmp_path)["direct"] == ("--nproc=4",)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("direct:\n  nprok: 4", r"~/.primus.yaml:2: unknown key 'direct.nprok'\n  did you mean 'nproc'\?"),
        ("slurm:\n  partiton: x", r"~/.primus.yaml:2: unknown key 'slurm.partiton'\n  did you mean 'partition'\?"),
        ("slrm:\n  nodes: 1", r"~/.primus.yaml:2: unknown section 'slrm'\n  did you mean 'slurm'\?"),
        ("main: {debugg: true}", r"~/.primus.yaml:1: unknown key 'main.debugg'"),
        ("main: {debug: 3}", "true or false"),
        ("slurm: 3", "must be a mapping of options"),
        ("container:\n  options: [a]", "~/.primus.yaml:2: 'container.options' must be a mapping of options"),
        ("slrum: {}", "~/.primus.yaml: unknown section 'slrum'"),
        ("direct: {nproc: [1, 2]}", "takes one value, not a list"),
        ("direct: {nproc: {a: 1}}", "must be a value, not a mapping"),
    ],
)
def test_what_means_nothing_is_refused_with_its_place(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=problem):
        applied("slurm -- direct --env A=1 -- runs list", text, tmp_path)


def test_the_file_is_an_option_of_the_launcher_and_its_runtimes() -> None:
    assert launcher_file.take_choice(["--debug", "--config", "f", "direct"]) == (
        ["--debug", "direct"],
        LauncherFileChoice("f"),
    )
    assert launcher_file.take_choice(["--no-config", "direct"]) == (["direct"], LauncherFileChoice(is_off=True))
    for typed in ("--config=f direct", "slurm --config f", "slurm -N 2 -- container --config f"):
        kept, choice = launcher_file.take_choice([*typed.split(), "--", "train", "pretrain", "--config", "x"])
        assert (kept[-4:], choice) == (["train", "pretrain", "--config", "x"], LauncherFileChoice("f"))
        assert "f" not in kept
    assert launcher_file.take_choice(["train", "--config", "x"]) == (["train", "--config", "x"], LauncherFileChoice())
    for words in (["--config"], ["direct", "--config", "--", "runs"]):
        with pytest.raises(UsageError, match="needs a file"):
            launcher_file.take_choice(words)
    with pytest.raises(UsageError, match="given twice: f and g"):
        launcher_file.take_choice(["--config", "f", "direct", "--config", "g"])


def test_a_named_file_that_may_not_be_looked_for_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    environ = {"HOME": "/root", "PRIMUS_LAUNCHER_FILE": "/root/mine.yaml"}
    with pytest.raises(UsageError, match=r"/root/mine.yaml: cannot be read: Permission denied\n  --no-config"):
        launcher_file.apply_defaults(parse_command("direct -- runs list".split()), LauncherFileChoice(), environ)


def test_a_dry_run_says_what_comes_from_where_and_hides_secrets(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "main: {dry_run: true}\nslurm: {partition: gpu}\ndirect:\n  env: {A_TOKEN: canary, NCCL_DEBUG: INFO}\n"
    )
    done = cli.run("--config", "mine.yaml", "slurm", "-N", "2", "--", "runs", "list", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "note: slurm: --partition=gpu, mine.yaml:2" in done.stdout
    assert "mine.yaml:4" in done.stdout
    assert "--no-config direct --env=A_TOKEN" in done.stdout
    assert "canary" not in done.stdout + done.stderr
    done = cli.run("--config", "none.yaml", "direct", "--", "runs", "list", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "primus-cli: none.yaml: no such file\n  did you mean 'mine.yaml'?\n")


def test_the_users_file_is_read(tmp_path: Path) -> None:
    (tmp_path / ".primus.yaml").write_text("direct: {env: [SHOWN=yes]}\n")
    home = {"HOME": str(tmp_path), "PRIMUS_LAUNCHER_FILE": None}
    done = cli.run("--dry-run", "direct", "--", "runs", "list", cwd=tmp_path, **home)
    assert "note: direct: --env=SHOWN=yes, ~/.primus.yaml:1" in done.stdout, done.stderr
    done = cli.run("--no-config", "--dry-run", "direct", "--", "runs", "list", cwd=tmp_path, **home)
    assert "SHOWN" not in done.stdout


def test_files_of_the_site_stand_below_those_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "etc/primus/launcher.yaml": "slurm: {partition: a, account: a, qos: a, time: 1, nodes: 1}",
        "second/primus/launcher.yaml": "slurm: {account: b, qos: b, time: 2, nodes: 2}",
        "first/primus/launcher.yaml": "slurm: {qos: c, time: 3, nodes: 3}",
        "home/.config/primus/launcher.yaml": "slurm: {time: 4, nodes: 4}",
        "home/.primus.yaml": "slurm: {nodes: 5}",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(launcher_file, "SITE_FILE", str(tmp_path / "etc/primus/launcher.yaml"))
    folders = f"{tmp_path}/first:{tmp_path}/second"
    environ = {"HOME": str(tmp_path / "home"), "XDG_CONFIG_DIRS": folders}

    def read(**more: str) -> set[str]:
        command = parse_command("slurm -- runs list".split())
        found = launcher_file.apply_defaults(command, LauncherFileChoice(), environ | more)
        return set(found.request.runtimes[0].words)

    assert read() == {"--partition=a", "--account=b", "--qos=c", "--time=4", "--nodes=5"}
    assert read(PRIMUS_LAUNCHER_FILE="") == {"--partition=a", "--account=b", "--qos=c", "--time=3", "--nodes=3"}
    assert "--time=3" in read(XDG_CONFIG_HOME=str(tmp_path / "none"))


def test_a_switch_that_is_on_by_default_is_turned_off_and_what_is_typed_turns_it_on_again(tmp_path: Path) -> None:
    assert runtimes("container -- runs list", "container: {devices: false}", tmp_path)["container"] == ("--no-devices",)
    assert runtimes("container -- runs list", "container: {devices: true}", tmp_path)["container"] == ("--devices",)
    typed = runtimes("container --devices -- runs list", "container: {devices: false}", tmp_path)["container"]
    assert typed == ("--devices",)
