"""Container engines that only write down what they are asked: real executables on PATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SCRIPT = """\
#!/bin/sh
here={folder}
printf '%s ' "${{0##*/}}" "$@" >>"$here/calls"
echo >>"$here/calls"
case $1 in
ps) cat "$here/ps" 2>/dev/null; exit 0 ;;
container) cat "$here/inspect-$5" 2>/dev/null; exit 0 ;;
image) echo sha256:0123; echo registry/image@sha256:4567; exit 0 ;;
stop | kill) : >"$here/stopped"; exit 0 ;;
run | exec)
    printf '%s\\0' "$@" >"$here/argv"
    cat /proc/$$/environ >"$here/environ"
    [ ! -x "$here/body" ] || exec "$here/body" "$@"
    ;;
--version) echo "fake 1.0" ;;
esac
exit 0
"""

RECORD = """
import json, pathlib, sys
file = pathlib.Path(sys.argv[sys.argv.index("--run") + 1]) / "metadata.json"
outcome = {"state": "done", "exit_code": 0}
file.write_text(json.dumps({**json.loads(file.read_text()), "ended": 2.0e9, "outcome": outcome}))
"""


class Engines:
    """docker, podman and apptainer in a folder that comes first on PATH."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        for name in ("docker", "podman", "apptainer"):
            self.make(name)
        self.path = f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"

    def make(self, name: str, script: str = SCRIPT) -> None:
        (self.folder / name).write_text(script.format(folder=self.folder))
        (self.folder / name).chmod(0o755)

    def inside(self, body: str) -> None:
        """What a container does: a shell script that gets the engine's words."""
        (self.folder / "body").write_text(f"#!/bin/sh\n{body}\n")
        (self.folder / "body").chmod(0o755)

    def record_success(self) -> None:
        """Containers record that their run is done, as the launcher in an image does."""
        self.inside(f"exec {sys.executable} -c '{RECORD}' \"$@\"")

    @property
    def argv(self) -> list[str]:
        """Words of the last container that was started."""
        return (self.folder / "argv").read_bytes().decode().split("\0")[:-1]

    @property
    def environ(self) -> dict[str, str]:
        """Variables of its client."""
        entries = (self.folder / "environ").read_bytes().decode().split("\0")[:-1]
        return dict(entry.partition("=")[::2] for entry in entries)

    @property
    def calls(self) -> list[str]:
        """All that the engines were asked, in order."""
        file = self.folder / "calls"
        return [line.strip() for line in file.read_text().splitlines()] if file.exists() else []
