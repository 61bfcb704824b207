"""`ssh` plans a connection to every host, and tells each its node by standard input; `ssh` itself is a fake here."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes import cli
from primus.errors import UsageError
from primus.launch import inherited_variables, prepare
from primus.launch.command import parse_segment_options
from primus.plan import LaunchPlan, PlanContext, Variable
from primus.runtime import RequestSegment
from primus.runtimes.ssh import FIRST_PORT, NUM_PORTS, Options, build_ssh_command, hosts, script, wrap
from primus.runtimes.ssh.hosts import SshHost

SHELLS = [name for name in ("sh", "bash", "dash", "zsh", "ksh", "busybox") if shutil.which(name)]


def expanded(*words: str, files: tuple[str, ...] = (), user: str | None = None, port: int | None = None) -> list[str]:
    return [host.display_name for host in hosts.parse_hosts(words, files, user, port)]


def test_hosts_are_lists_ranges_and_addresses() -> None:
    assert expanded("a,b", "c") == ["a", "b", "c"]
    assert expanded("node[08-10,12]-ib") == ["node08-ib", "node09-ib", "node10-ib", "node12-ib"]
    assert expanded("r[1-2]n[01-02]") == ["r1n01", "r1n02", "r2n01", "r2n02"]
    assert expanded("[fe80::1]:2222,fe80::2,10.0.0.1:22") == ["fe80::1:2222", "fe80::2", "10.0.0.1:22"]
    assert hosts.parse_hosts(["me@a:7", "b"], (), "you", 9) == (SshHost("a", "me", 7), SshHost("b", "you", 9))


def test_a_hostfile_has_a_host_a_line(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# ours\nnode[1-2]\n\nme@c:2222  # the fast one\n")
    assert expanded(files=(str(tmp_path / "hosts"),)) == ["node1", "node2", "c:2222"]
    (tmp_path / "slots").write_text("a\nb slots=8\n")
    with pytest.raises(UsageError, match=r"slots:2: unexpected 'slots=8' after a host"):
        expanded(files=(str(tmp_path / "slots"),))
    with pytest.raises(UsageError, match="No such file"):
        expanded(files=(str(tmp_path / "none"),))
    (tmp_path / "empty").write_text("# none yet\n")
    with pytest.raises(UsageError, match="contains no host"):
        expanded("a", files=(str(tmp_path / "empty"),))


@pytest.mark.parametrize("words", ["--port 0", "--port 70000", "--master-port 99999", "--connect-timeout 0"])
def test_what_is_no_port_is_refused(words: str) -> None:
    with pytest.raises(UsageError, match=f"{words}: expected int [<>]="):
        parse_segment_options(RequestSegment("ssh", ("--hosts", "a", *words.split())))


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("a,b,a", "host a is given twice"),
        ("node[1-2],node2", "host node2 is given twice"),
        ("-oProxyCommand=id", "is not a host"),
        ("a;id", "is not a host"),
        ("a b", "is not a host"),
        ("$(id)", "is not a host"),
        ("-x@a", "is not a host"),
        ("a:99999", "is not a host"),
        ("n[5-2]", "is not a range"),
        ("n[1-999999]", "is not a range"),
        ("", "needs hosts"),
    ],
)
def test_what_is_no_host_is_refused(word: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem.replace("[", r"\[")):
        expanded(word)


def context(there: tuple[str, ...] = ("primus-cli", "direct", "--", "runs", "list"), **environ: str) -> PlanContext:
    return PlanContext(environ=environ, python="python", there=there, directory="/runs/night/20260101_000000-abcd")


def planned(
    given: dict[str, Variable] | None = None, environ: dict[str, str] | None = None, **options: Any
) -> LaunchPlan:
    level = context(**(environ or {}))
    chosen = Options(**{"hosts": ("a,b",), **options})
    return wrap(LaunchPlan(argv=level.there, env=given or {}), chosen, level)


def test_the_command_line_is_a_constant_and_asks_nobody() -> None:
    argv = planned().argv
    assert argv[-3:] == ("--", "a", script.BOOTSTRAP)
    assert "BatchMode=yes" in argv
    assert argv[argv.index("BatchMode=yes") :] == planned({"B": Variable("y", "z")}, {"A": "x"}).argv[4:]


def test_options_of_the_user_come_before_ours() -> None:
    argv = build_ssh_command(SshHost("a", "me", 7), Options(option=("ConnectTimeout=1", "ProxyJump=gate")))
    assert argv.index("ConnectTimeout=1") < argv.index("ConnectTimeout=15")
    assert argv[-7:-1] == ("-l", "me", "-p", "7", "--", "a")
    with pytest.raises(UsageError, match="expected NAME=VALUE"):
        planned(option=("-oX",))


def test_nodes_get_their_place_and_a_port_that_follows_from_the_run() -> None:
    env = planned().env
    assert (env["NNODES"].value, env["MASTER_ADDR"].value) == ("2", "a")
    assert FIRST_PORT <= int(env["MASTER_PORT"].value) < FIRST_PORT + NUM_PORTS
    assert env == planned().env
    given = planned(master_addr="a-ib", master_port=4000).env
    assert (given["MASTER_ADDR"].value, given["MASTER_PORT"].value) == ("a-ib", "4000")
    assert "MASTER_PORT" not in planned(hosts=("a",)).env


def test_variables_are_passed_on_by_name() -> None:
    environ = {"HF_TOKEN": "canary", "NCCL_DEBUG": "INFO", "NCCL_X": "1", "PRIMUS_TEAM": "us", "HOME": "/h"}
    environ |= {"PRIMUS_SAFE_TOKEN": "canary", "PRIMUS_VENV": "/here"}
    plan = wrap(
        LaunchPlan(
            argv=("x",), env={"S_KEY": Variable("canary", "--env", is_secret=True)}, inherited=("WANDB", "HOME")
        ),
        Options(hosts=("a",), env=("HF_TOKEN", "NCCL_*", "A=1", "S_KEY")),
        context(**environ),
    )
    assert plan.inherited == ("HF_TOKEN", "HOME", "NCCL_DEBUG", "NCCL_X", "PRIMUS_TEAM", "PRIMUS_VENV")
    assert plan.env["A"] == Variable("1", "--env")
    assert plan.env["S_KEY"].value == "canary"
    with pytest.raises(UsageError, match="the variable is not set"):
        planned(hosts=("a",), env=("NONE",))


def test_the_entry_may_be_another_one_there() -> None:
    def inner(**options: str) -> tuple[str, ...]:
        plan = planned(**options).inner
        assert plan
        return plan.argv

    assert inner() == ("primus-cli", "direct", "--", "runs", "list")
    assert inner(entry="/opt/p") == ("/opt/p", "direct", "--", "runs", "list")
    assert inner(python="/opt/python")[:2] == ("/opt/python", "-c")
    with pytest.raises(UsageError, match="cannot be combined"):
        inner(entry="a", python="b")


class Far:
    """A shell on a host: what sshd does with a command line, its input kept open."""

    def __init__(self, shell: str, text: str, **env: str) -> None:
        argv = [shell, *(["sh"] if shell == "busybox" else []), "-c", script.BOOTSTRAP]
        pipe = subprocess.PIPE
        environ = {"PATH": os.environ["PATH"], **env}
        self.process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=environ)
        self.say(script.encode_with_length(text))

    def say(self, data: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def line(self) -> bytes:
        assert self.process.stdout
        return self.process.stdout.readline()

    def result(self) -> tuple[int, bytes, bytes]:
        """Exit code and all that it says; its input ends only then."""
        assert self.process.stdout and self.process.stderr and self.process.stdin
        out, err = self.process.stdout.read(), self.process.stderr.read()
        code = self.process.wait(timeout=10)
        self.hang_up()
        return code, out, err

    def hang_up(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream
            stream.close()


hostile = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["$(touch pwned)", "`id`", "a'b\"c", "-n", "x\ny\n", "\\", "\n", "é,=;&|>", "y" * 100_000, "}", "$'\\x41'", "!!"]
)


@pytest.mark.parametrize("shell", SHELLS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(hostile, max_size=3), value=hostile, folder=hostile.filter(lambda text: 0 < len(text) < 50))
def test_any_value_arrives_unchanged_in_any_shell(
    shell: str, tmp_path: Path, words: list[str], value: str, folder: str
) -> None:
    place = tmp_path / ("d" + folder.replace("/", "_"))
    place.mkdir(exist_ok=True)
    show = ("sh", "-c", 'pwd; printf "%s\\0" "$SHOWN" "$@"', "show")
    code, out, err = Far(shell, script.format_remote_script((*show, *words), str(place), {"SHOWN": value})).result()
    assert (code, err) == (0, b"")
    assert out == b"\0".join(os.fsencode(text) for text in (f"{place}\n{value}", *words, ""))


@pytest.mark.parametrize("shell", SHELLS)
def test_the_exit_code_and_both_streams_come_back(shell: str, tmp_path: Path) -> None:
    far = Far(shell, script.format_remote_script(("sh", "-c", "echo out; echo err >&2; exit 7"), str(tmp_path), {}))
    assert far.result() == (7, b"out\n", b"err\n")
    far = Far(shell, script.format_remote_script(("no-such-program",), str(tmp_path), {}))
    code, _, err = far.result()
    assert code == 127
    assert b"no-such-program" in err
    assert Far(shell, script.format_remote_script(("true",), "/no/such/folder", {})).result()[0] == 1


def test_half_a_script_does_nothing(tmp_path: Path) -> None:
    text = script.format_remote_script(("touch", "done"), str(tmp_path), {})
    far = Far("sh", text[:-3])
    assert far.result()[0] != 0
    assert not list(tmp_path.iterdir())


WAITS = (
    "trap 'echo USR1' USR1; trap 'echo late; echo late >&2; echo saved >saved; exit 0' TERM; "
    "echo ready; while :; do sleep 0.05; done"
)


@pytest.mark.parametrize("shell", SHELLS)
def test_signals_cross_the_connection_as_words(shell: str, tmp_path: Path) -> None:
    far = Far(shell, script.format_remote_script(("bash", "-c", WAITS), str(tmp_path), {}))
    assert far.line() == b"ready\n"
    far.say(b"USR1\n")
    assert far.line() == b"USR1\n"
    far.say(b"KILL\n; rm -rf x\nTERM\n")
    assert far.result() == (0, b"late\n", b"late\n")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_command_saves_and_ends_after_its_connection_is_gone(shell: str, tmp_path: Path) -> None:
    far = Far(shell, script.format_remote_script(("bash", "-c", WAITS), str(tmp_path), {}))
    assert far.line() == b"ready\n"
    far.hang_up()
    assert far.process.wait(timeout=10) == 0
    assert (tmp_path / "saved").is_file()


FAKE_SSH = """\
while [ "$1" != -- ]; do shift; done
# A host that fails does so once the program of another one is ready for signals.
if [ -n "$READY" ]; then for i in {1..600}; do [ -e "$READY" ] || [ "$2" = a ] || sleep 0.05; done; fi
case $2 in
    down*) echo "ssh: connect to host $2 port 22: Connection refused" >&2; exit 255 ;;
    unknown*) echo "Host key verification failed." >&2; exit 255 ;;
    changed*)
        echo "Host key for [$2]:2 has changed and you have requested strict checking." >&2
        echo "Host key verification failed." >&2
        exit 255 ;;
    open*)
        echo 'Load key "/k/id": bad permissions' >&2
        echo "me@open: Permission denied (publickey)." >&2
        exit 255 ;;
    lost*) echo "Timeout, server $2 not responding." >&2; exit 255 ;;
    killed*) exit 255 ;;
esac
HOST=$2 exec bash -c "$3"
"""


@pytest.fixture
def far_hosts(tmp_path: Path) -> dict[str, str]:
    """Variables by which `ssh` is a program that runs what it is given on this machine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(f"#!/bin/bash\n{FAKE_SSH}")
    (folder / "ssh").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def ssh(names: str, program: str = "echo out of $HOST; echo err of $HOST >&2", *options: str) -> list[str]:
    """The words that start `program`, which stands for primus-cli, on hosts."""
    Path("entry").write_text(f"#!/bin/bash\n{program}\n")
    Path("entry").chmod(0o755)
    return ["ssh", "--hosts", names, *options, "--entry", f"{Path.cwd()}/entry", "--", "runs", "list"]


def test_host_0_speaks_as_if_it_were_here(
    tmp_path: Path, far_hosts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = cli.run(*ssh("a,b,c"), cwd=tmp_path, **far_hosts)
    assert (done.returncode, done.stdout) == (0, "out of a\n")
    lines = ["b: err of b", "b: out of b", "c: err of c", "c: out of c", "err of a"]
    assert sorted(done.stderr.splitlines()) == lines


def test_each_host_knows_its_place(tmp_path: Path, far_hosts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = 'echo "$NODE_RANK of $NNODES at $MASTER_ADDR, $(pwd), $*" >place.$HOST'
    assert cli.run(*ssh("a,b", program), cwd=tmp_path, **far_hosts).returncode == 0
    assert (tmp_path / "place.b").read_text() == f"1 of 2 at a, {tmp_path}, direct -- runs list\n"


@pytest.mark.parametrize(
    ("names", "code", "message"),
    [
        ("a,down", 3, "node 1 (down): cannot be reached: Connection refused"),
        ("down1,down2", 3, "): cannot be reached: Connection refused"),  # either may be seen first
        (
            "a,a@unknown:2",
            3,
            "node 1 (unknown:2): unknown host key\n  log in once in a terminal: ssh -p 2 a@unknown",
        ),
        (
            "a,unknown --option UserKnownHostsFile=/x --port 22 --user me",
            3,
            "\n  log in once in a terminal: ssh -o UserKnownHostsFile=/x -p 22 me@unknown",
        ),
        (
            "a,changed",
            3,
            "its host key has changed\n  if the host was installed again: ssh-keygen -R '[changed]:2'; else",
        ),
        ("a,open", 3, "ssh ignores the key /k/id, which others may read\n  chmod 600 /k/id"),
        ("a,lost", 1, "node 1 (lost): the connection was lost"),
        ("a,killed", 137, "node 1 (killed): its launcher was killed"),
    ],
)
def test_the_first_host_that_fails_is_named_and_ends_the_others(
    tmp_path: Path, far_hosts: dict[str, str], monkeypatch: pytest.MonkeyPatch, names: str, code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    program = "trap 'echo ended >ended; exit 1' TERM; touch ready; for i in {1..600}; do sleep 0.05; done"
    hosts, *options = names.split()
    ready = str(tmp_path / "ready") if names.startswith("a,") else ""
    done = cli.run(
        *ssh(hosts, program, *options),
        cwd=tmp_path,
        before="from primus.runtimes.ssh import nodes; nodes.PEERS_S = 0.5",
        READY=ready,
        **far_hosts,
    )
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert (tmp_path / "ended").exists() == names.startswith("a,")


def test_a_failing_node_gives_its_exit_code(
    tmp_path: Path, far_hosts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = cli.run(*ssh("a,b", "[ $HOST = a ] || { echo bad news; exit 9; }"), cwd=tmp_path, **far_hosts)
    assert done.returncode == 9
    assert "node 1 (b) failed with exit code 9" in done.stderr
    assert "b: bad news" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_host(
    tmp_path: Path, far_hosts: dict[str, str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.chdir(tmp_path)
    name = number.name.removeprefix("SIG")
    program = f"trap 'echo ended >ended.$HOST; exit {128 + number}' {name}; >ready.$HOST; "
    program += "for i in {1..600}; do sleep 0.05; done"
    with cli.started(*ssh("a,b", program), cwd=tmp_path, **far_hosts) as process:
        cli.wait_for(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "both nodes")
        os.kill(process.pid, number)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number, err
    assert sorted(path.name for path in tmp_path.glob("ended.*")) == ["ended.a", "ended.b"]


def test_no_secret_stands_in_a_command_line(
    tmp_path: Path, far_hosts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ssh("a,b", "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' >seen.$HOST; echo $A_TOKEN $HF_TOKEN >got.$HOST")
    words[1:1] = ["--env", "A_TOKEN=canary-of-ssh-typed", "HF_TOKEN"]
    (tmp_path / "words").write_text("\n".join(words))
    launcher = "import sys; sys.argv[1:] = open('words').read().split('\\n')"
    done = cli.run(cwd=tmp_path, before=launcher, HF_TOKEN="canary-of-ssh-shell", **far_hosts)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "got.b").read_text() == "canary-of-ssh-typed canary-of-ssh-shell\n"
    assert f"{tmp_path}/entry direct" in (tmp_path / "seen.b").read_text(), "the command lines of all processes"
    assert "canary-of-ssh" not in (tmp_path / "seen.a").read_text() + (tmp_path / "seen.b").read_text()
    (tmp_path / "words").write_text("\n".join(["--dry-run", *words]))
    done = cli.run(cwd=tmp_path, before=launcher, HF_TOKEN="canary-of-ssh-shell", **far_hosts)
    assert "A_TOKEN=<secret>" in done.stdout
    assert "canary" not in done.stdout + done.stderr


def test_a_plan_shows_the_command_for_every_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    words = ["--dry-run", "ssh", "--hosts", "me@node[01-03]:2222", "--option", "ProxyJump=gate", "--env", "HF_TOKEN"]
    words += ["--env", "NCCL_DEBUG=INFO", "--", "direct", "--nproc", "8", "--", "runs", "list"]
    unset = dict.fromkeys(set(inherited_variables.list_inherited_names(os.environ)) | {"PRIMUS_PLUGINS"}) | {
        "HF_TOKEN": "canary"
    }
    done = cli.run(*words, cwd=tmp_path, **unset)
    assert done.returncode == 0, done.stderr
    text = done.stdout.replace(str(tmp_path), "/here").replace(prepare.find_entry_point(), "PRIMUS-CLI")
    golden("ssh/plan.txt", re.sub(r"MASTER_PORT=2\d{4}", "MASTER_PORT=2NNNN", text))


def test_the_script_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    golden(
        "ssh/script.sh",
        script.format_remote_script(("primus-cli", "direct", "--", "runs", "list"), "/my work", {"A": "it's"}),
    )
