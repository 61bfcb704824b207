"""Script of a pod: create the run folder from the job's files, then start the command.

It has to be shell, because the image may have no Python outside of primus' environment, and the run folder must exist
before `primus-cli direct --run` reads it.
"""

RUN_FILES = "/primus/run"
"""Folder in the pod with the job's files, read-only."""
SCRIPT = "node.sh"
RUN_SCRIPT = f"{RUN_FILES}/{SCRIPT}"

TEXT = """\
#!/bin/sh
# node.sh FOLDER WORKDIR COMMAND...: creates the run folder from the files next to this script, and becomes COMMAND.
# All pods do so at once. Each makes a copy and renames it; the first rename wins, and the others delete their copies.
set -eu
folder=$1 workdir=$2
shift 2
if [ ! -e "$folder/metadata.json" ]; then
    mkdir -p "$(dirname "$folder")"
    copy=$(mktemp -d "$folder.XXXXXX")
    chmod 755 "$copy"
    cp -RL "$(dirname "$0")/files/." "$copy"
    mv -T "$copy" "$folder" 2>/dev/null || rm -rf "$copy"
    if [ ! -e "$folder/metadata.json" ]; then
        echo "node.sh: $folder cannot be created" >&2
        exit 1
    fi
fi
cd "$workdir"
exec "$@"
"""
"""`mv -T` renames a folder, or fails if the target is not empty: rename(2)."""
FILES = "files"
"""Folder next to the script with the run folder's files."""
