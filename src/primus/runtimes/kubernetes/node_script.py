"""What a pod does first: make its run folder of the files that came with the job."""

RUN_FILES = "/primus/run"
"""Where a pod sees the files that came with its job; they are read-only."""
SCRIPT = "node.sh"
RUN_SCRIPT = f"{RUN_FILES}/{SCRIPT}"

TEXT = """\
#!/bin/sh
# node.sh FOLDER WORKDIR COMMAND...: makes the run folder of the files beside this script where it is not there yet, and
# becomes COMMAND. All pods do so at once: each makes a copy, and the first one to rename its own has made the folder.
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
        echo "node.sh: $folder cannot be made" >&2
        exit 1
    fi
fi
cd "$workdir"
exec "$@"
"""
"""`mv -T` renames a folder or fails where the other one is not empty: rename(2)."""
FILES = "files"
"""Folder beside the script with the run folder's files."""
