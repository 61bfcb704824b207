"""A hostile script changes nothing and reaches nothing: each way out of the sandbox is tried."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from primus.config.imports.sandbox.run_script import RunRequest, RunResult, get_limit_s, run_script

SECRET = "canary-of-this-test"
MOST_AT_ONCE = 12


class Host:
    """What a script must not reach: files, a process, a server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "precious"
        self.file.write_text(SECRET)
        self.file.chmod(0o666)
        folder.chmod(0o777)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)
        self.port = self.server.getsockname()[1]
        self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.datagrams.bind(("127.0.0.1", self.port))
        self.datagrams.setblocking(False)
        self.victim = subprocess.Popen(["cat"], stdin=subprocess.PIPE)

    def run(self, text: str) -> RunResult:
        script = str(self.folder / "run.sh")
        filled = text.replace("FILE", str(self.file)).replace("FOLDER", str(self.folder))
        filled = filled.replace("PORT", str(self.port)).replace("VICTIM", str(self.victim.pid))
        result = run_script(RunRequest(argv=[script], cwd=str(self.folder), files={script: f"{filled}\n"}))
        if result.unavailable.startswith(("Operation not permitted", "No space left", "it needs bash")):
            pytest.skip(f"no sandbox here: {result.unavailable}")
        assert not result.unavailable
        return result

    def close(self) -> None:
        self.server.close()
        self.datagrams.close()
        self.victim.communicate()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("MY_PW", SECRET)
    host = Host(tmp_path)
    yield host
    host.close()


ATTACKS = {
    "files": [
        "echo x > FILE",
        "echo x >> FILE",
        "> FILE",
        "echo x >| FILE",
        "exec 3<>FILE; echo x >&3",
        "rm -f FILE; rm -rf FOLDER / /*",
        "/bin/rm -f FILE",
        "mv FILE FOLDER/other; cp /dev/null FILE",
        "ln -sf /etc/passwd FOLDER/link; touch FOLDER/new; mkdir FOLDER/sub; chmod 0 FILE",
        "sed -i s/canary/gone/ FILE; tee FILE <<< x",
        "cd FOLDER; printf x > precious; printf x > ./new",
        'awk \'BEGIN { print "x" > "FILE"; system("echo x > FILE") }\'',
        "sed 'w FILE' <<< x; sed '1e echo x > FILE' <<< x",
        "enable -f FILE evil; enable -f /proc/self/exe evil",
        "set -o history; HISTFILE=FILE; history -s x; history -w FILE",
        "shopt -s failglob; umask 0; ulimit -f unlimited; echo x > FILE",
        "trap 'echo x > FILE' EXIT ERR DEBUG RETURN; false",
        "coproc { echo x > FILE; }; wait",
        "(echo x > FILE) & disown; echo $(echo x > FILE)",
        "exec bash -c 'echo x > FILE'",
        "builtin exec /bin/bash -c 'echo x > FILE'",
        "unset BASH_ENV; unset -f command_not_found_handle bash; \\command /bin/bash -c 'echo x > FILE'",
        'hash -p /bin/rm harmless; harmless FILE; PATH=/bin:/usr/bin; \\rm FILE; \\python3 -c \'open("FILE", "w")\'',
        "for p in /usr/bin /bin /usr/local/bin; do for c in $p/*; do \\builtin exec $c FILE; done; done",
        "/lib64/ld-linux-x86-64.so.2 /bin/cp /dev/null FILE; /lib/ld-linux-aarch64.so.1 /bin/cp /dev/null FILE",
        "echo x > /proc/1/root/FILE; echo x > /proc/self/root/FILE; cd /proc/1/root && echo x > FILE",
        "echo x > /proc/1/cwd/FILE; cd /proc/1/cwd && echo x > FILE",
        "for d in .. ../.. ../../../../../../..; do echo x > $d/FILE; done",
        "echo core > /proc/sys/kernel/core_pattern; echo 1 > /proc/sys/kernel/sysrq; echo b > /proc/sysrq-trigger",
        "for f in /proc/[0-9]*/mem; do exec 4<>$f && echo x >&4; done",
        "echo x > /usr/bin/bash; echo x > /bin/bash; echo x > /usr/bin/sed; echo x > /etc/ld.so.cache; > /dev/sda",
        "eval \"$(printf 'ech%s x > FILE' o)\"; source <(echo 'echo x > FILE'); . /dev/stdin <<< 'echo x > FILE'",
        "BASH_FUNC_x%%='() { :; }; echo x > FILE' bash -c :; env -i bash --norc -c 'echo x > FILE'",
    ],
    "processes": [
        "kill -9 VICTIM; kill -9 -1; kill -9 -VICTIM; kill -TERM 1; kill -INT 1; kill -STOP 1",
        "for ((p = 1; p < 5000; p++)); do builtin kill -9 $p 2>/dev/null; done",
        "suspend -f",
    ],
    "reading": [
        'report "$(<FILE)" "$(cat FILE)"; mapfile -t a < FILE; report "${a[@]}"; read b < FILE; report "$b"',
        'mapfile a < /etc/shadow; mapfile b < /etc/passwd; report "${a[@]}" "${b[@]}"; report "$(cat /etc/hosts)"',
        'report "$MY_PW" "$(export -p)" "$(declare -p)"; for v in $(compgen -v); do report "${!v}"; done',
        "for p in 1 self; do mapfile -d '' a < /proc/$p/environ; report \"${a[@]}\"; done",
        'for f in /proc/*/environ /proc/*/cmdline /proc/*/maps; do report "$(<$f)"; done',
        'shopt -s globstar dotglob; for f in /** ~/.ssh/* /root/* /home/*/*; do report "$(head -c 99 $f)"; done',
        'cd FOLDER/..; report * ; for f in */precious; do report "$(<$f)"; done',
    ],
    "network": [
        "exec 5<>/dev/tcp/127.0.0.1/PORT; echo GET >&5; echo x > /dev/udp/127.0.0.1/PORT",
        "exec 5<>/dev/tcp/localhost/PORT; report $(</dev/tcp/127.0.0.1/PORT)",
        "curl http://127.0.0.1:PORT/; \\wget 127.0.0.1:PORT; ssh localhost 'echo x > FILE'; nc 127.0.0.1 PORT",
    ],
    "consumption": [
        "f() { f | f & }; f; wait",
        ":(){ :|:& };:",
        "while :; do :; done",
        "while true; do sleep 1; done",
        "a=x; while :; do a=$a$a; done",
        "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx >> big; done",
        "for ((i = 0; ; i++)); do echo x > f$i; done",
        "while :; do report x; done",
        "yes | head -c 100000000000; read x; cat; wait",
        "trap '' TERM INT HUP XCPU; while :; do (:); done",
        'ulimit -n 4096; for ((i = 10; i < 4000; i++)); do eval "exec $i</dev/null"; done',
        "source $0",
        "bash $0",
    ],
    "the recorder itself": [
        "rm -rf /.primus; ln -s FILE /.primus/trace; mkdir /.primus; ln -s FILE /.primus/errors",
        "mkfifo /.primus/records/9.9; ln -s /dev/zero /.primus/records/8.8; printf '\\0\\0\\0' > /.primus/records/7",
    ],
}
"""Scripts by what they attack. Each kind runs at once: those that never end wait for the same time limit."""


@pytest.mark.parametrize("kind", ATTACKS)
def test_a_hostile_script_changes_nothing_and_reaches_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_PW", SECRET)
    folders = [tmp_path / str(number) for number, _ in enumerate(ATTACKS[kind])]
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        list(pool.map(attack_host, folders, ATTACKS[kind]))


def attack_host(folder: Path, attack: str) -> None:
    """Run one attack against a host of its own, and look at the host."""
    folder.mkdir()
    host = Host(folder)
    before = sorted(path.name for path in folder.iterdir())
    begin = time.monotonic()
    result = host.run(attack)
    assert time.monotonic() - begin < 3 * get_limit_s() + 10, attack
    assert host.file.read_text() == SECRET, attack
    assert host.file.stat().st_mode & 0o777 == 0o666, attack
    assert sorted(path.name for path in folder.iterdir()) == before, attack
    assert host.victim.poll() is None, attack
    reports = [word for record in result.records if record.words[0] == "report" for word in record.words]
    assert SECRET not in str(reports), attack
    assert not [word for word in reports if "root:" in word], attack
    with pytest.raises(BlockingIOError):
        host.server.accept()
    with pytest.raises(BlockingIOError):
        host.datagrams.recv(1)
    host.close()


def test_no_process_outlives_the_sandbox(host: Host) -> None:
    host.run("(while :; do echo x > /dev/null; done) & disown; setsid bash -c 'while :; do :; done' &")
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(host.folder / "run.sh") not in running


def test_what_a_script_writes_is_in_a_limited_memory(host: Host) -> None:
    result = host.run("for ((i = 0; i < 40; i++)); do head -c 3000000 /dev/zero > f$i || report full; done; report end")
    assert ["report", "end"] in [record.words for record in result.records] or "No space left" in result.errors


def test_a_script_has_a_limited_memory_of_its_own(host: Host) -> None:
    assert "cannot allocate" in host.run("printf -v A %300000000s x").errors


def test_root_does_not_run_a_script_as_root(host: Host) -> None:
    result = host.run('report "$UID" "$EUID"')
    assert ["report", "1000", "1000"] in [record.words for record in result.records]
    assert os.getuid() == os.geteuid()
