"""Format the script that a host reads from standard input: variables, working folder and command.

An SSH server passes the command line to the user's login shell, which parses it again, and every user of the host can
read it. The command line is therefore a constant (BOOTSTRAP), and the script is sent on standard input. Without a
terminal a connection transports no signals. Standard input therefore stays open after the script:

    a line with a signal's name     sends that signal to the command
    the end of the input            the connection or the launcher is lost: SIGTERM, after GRACE_S SIGKILL

It is a shell script because it runs before any Python is found (`primus-cli` finds or creates the environment). The
command replaces it (exec), so that signals also reach that first phase.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

BOOTSTRAP = """exec sh -c 'read -r size && eval "$(head -c "$size")"'"""
"""Command line on the host, the same for every task; sh, bash, zsh, fish and csh parse it in the same way."""

SIGNALS = ("INT", "TERM", "HUP", "USR1", "USR2")
GRACE_S = 90
"""Time between SIGTERM and SIGKILL; a launcher gives its workers 60 s of it."""

# `watch` runs in the background. $$ is the shell, and after its exec the command. A subshell outlives the command, so
# it checks that its parent is still that process before it sends a signal: the id may have been given to another one.
_WATCH = f"""\
is_alive() {{
    if [ -r /proc/self/stat ]; then
        read -r _ _ _ parent _ </proc/self/stat && [ "$parent" = $$ ]
    else
        kill -0 $$ 2>/dev/null
    fi
}}
watch() {{
    exec <&3 >/dev/null 2>&1 3<&-
    while read -r word; do
        case $word in {"|".join(SIGNALS)}) ! is_alive || kill -s "$word" $$ ;; esac
    done
    ! is_alive || kill -s TERM $$
    waited=0
    while is_alive; do
        [ $waited -lt {GRACE_S} ] || kill -s KILL $$
        sleep 1
        waited=$((waited + 1))
    done
}}
"""

# The output passes through two `cat` processes, which keep reading after ssh has exited: the command can then save its
# work without being killed by SIGPIPE. File 3 keeps standard input for `watch`; the command reads /dev/null.
_RELAY = """\
place=$(mktemp -d) && mkfifo "$place/out" "$place/err" || exit 1
exec 3<&0 </dev/null
(cat; exec cat >/dev/null) <"$place/out" &
(cat; exec cat >/dev/null) <"$place/err" >&2 &
exec >"$place/out" 2>"$place/err"
watch &
exec 3<&-
rm -r -- "$place"
"""


def format_remote_script(command: Sequence[str], directory: str, variables: Mapping[str, str]) -> str:
    """The script, in one pair of braces: the shell runs nothing of it if the transfer was cut."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    return f"{{\n{_WATCH}cd -- {shlex.quote(directory)} || exit 1\n{_RELAY}{exports}exec {shlex.join(command)}\n}}\n"


def encode_with_length(script: str) -> bytes:
    """`script` with its length in the first line, as BOOTSTRAP reads it."""
    data = os.fsencode(script)
    return b"%d\n" % len(data) + data
