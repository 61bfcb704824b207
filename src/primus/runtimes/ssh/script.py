"""What a host is told on its standard input: the variables, the folder and the command, by value.

An SSH server hands the command line to the user's login shell, which reads it again, and everybody on the host can see
it; so that line is a constant. Without a terminal no signal crosses a connection either. Standard input therefore stays
open after the script: a line with a signal's name sends that signal to the command, and the end of the input, which
comes whenever the connection or the launcher goes, sends SIGTERM and later SIGKILL. What the command says passes
through `cat`, so that it can save its work after nobody listens any more.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

BOOTSTRAP = """exec sh -c 'read -r size && eval "$(head -c "$size")"'"""
"""The command line on the host, the same for every task; it means the same to sh, bash, zsh, fish and csh."""

SIGNALS = ("INT", "TERM", "HUP", "USR1", "USR2")
GRACE_S = 90
"""Time between SIGTERM and SIGKILL; a launcher gives its workers 60 s of it."""

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
    """The script, in one pair of braces: nothing of it is done if its end is missing."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    return f"{{\n{_WATCH}cd -- {shlex.quote(directory)} || exit 1\n{_RELAY}{exports}exec {shlex.join(command)}\n}}\n"


def encode_with_length(script: str) -> bytes:
    """`script` as BOOTSTRAP reads it, its length first."""
    data = os.fsencode(script)
    return b"%d\n" % len(data) + data
