"""Hooks that are written for AMD-AGI/Primus run as they are: with its shell functions, arguments and folders."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes import cli
from primus.launch import run_node
from primus.launch.hooks import discovery, runner

CHECKOUT = os.environ.get("PRIMUS_TEST_PRIMUS_CHECKOUT")
"""A checkout of AMD-AGI/Primus, for the last two tests."""
EXPERIMENT = """\
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 3}}}
"""

LOGGING = """\
#!/bin/bash
set -euo pipefail
LOG_INFO_RANK0 "info of node 0"
LOG_INFO "plain info"
LOG_SUCCESS_RANK0 "built"
LOG_DEBUG "hidden"
LOG_WARN "a warning"
LOG_ERROR_RANK0 "an error"
if [[ -n "${NODE_RANK:-}" && "${GPUS_PER_NODE}" -ge 1 ]]; then echo "env.TOLD=$NODE_RANK of $NNODES at $MASTER_ADDR"; fi
"""
DISPATCH = """\
#!/bin/bash
set -euo pipefail
: "${1:?missing hook group}" "${2:?missing hook name}"
group="$1/$2"
shift 2
config=""
while [[ $# -gt 0 ]]; do
    case "$1" in
        --config) config="$2"; shift 2 ;;
        *) shift ;;
    esac
done
cd "$PRIMUS_PATH"
[[ "$config" = /* ]] || config="$PRIMUS_PATH/$config"
require_file "$config"
LOG_INFO "dispatching $group"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
bash "$here/abacus/00_install.sh" --config "$config"
exec python3 "$here/abacus/prepare.py" --config "$config" --primus_path "$PRIMUS_PATH"
"""
INSTALL = '[[ "$1" == --config ]] || die "not for the launcher"\nLOG_INFO_RANK0 "installing"\n'
PREPARE = """\
import argparse
from runner.helpers.hooks.train.pretrain.utils import log
parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
parser.add_argument("--primus_path", required=True)
log(parser.parse_args().primus_path)
print("extra.train_iters=2")
"""
UTILS = '''\
"""Helpers."""

import re
from pathlib import Path

import a_package_that_is_not_installed_here_or_anywhere as absent

_LEVELS = {"INFO": 20}
HERE = Path(__file__).resolve().parent
WORD = re.compile("[a-z]+")


def log(text):
    print("prepared", text)
'''


def checkout(folder: Path, **files: str) -> Path:
    """A checkout laid out as AMD-AGI/Primus, with hooks by name (`__` for a slash, `_sh` and `_py` for endings)."""
    helpers = folder / "Primus/runner/helpers"
    (helpers / "hooks").mkdir(parents=True)
    (helpers / "execute_hooks.sh").write_text("exit 1\n")
    for name, text in files.items():
        path = helpers / "hooks" / re.sub(r"_(sh|py)$", r".\1", name.replace("__", "/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return helpers / "hooks"


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def train(folder: Path, place: Path, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "night.yaml").write_text(EXPERIMENT)
    words = ("direct", "--", "train", "pretrain", "--config", "night.yaml")
    return cli.run(*words, cwd=folder, PRIMUS_HOOKS=str(place), **env)


def hook_logs(folder: Path) -> dict[str, str]:
    return {file.name.partition(".")[0]: file.read_text() for file in folder.glob("out*/*/*/logs/hooks/*.log")}


def test_hooks_use_the_functions_and_arguments_of_primus(tmp_path: Path) -> None:
    place = checkout(tmp_path, **{"00_log_sh": LOGGING, "train__pretrain__prepare_experiment_sh": DISPATCH,
        "train__pretrain__utils_py": UTILS.replace("import a_package", "# "), "train__pretrain__abacus__00_install_sh":
        INSTALL, "train__pretrain__abacus__prepare_py": PREPARE})  # fmt: skip
    done = train(tmp_path, place)
    assert done.returncode == 0, done.stderr
    logs = hook_logs(tmp_path)
    assert set(logs) == {"before_00_log", "before_prepare_experiment"}
    assert "[INFO] info of node 0\n" in logs["before_00_log"] and "hidden" not in logs["before_00_log"]
    assert "[WARN] a warning\n" in logs["before_00_log"] and "[ERROR] an error\n" in logs["before_00_log"]
    prepared = logs["before_prepare_experiment"]
    assert "[INFO] dispatching train/pretrain\n" in prepared and "[INFO] installing\n" in prepared
    assert f"prepared {place.parents[2]}\n" in prepared
    run = next(tmp_path.glob("out*/*/latest")).resolve()
    assert "TOLD=0 of 1 at localhost  # hook:" in (run / "env/primus_env_dump.txt").read_text()
    assert "train_iters: 2" in (run / "config/primus_config.yaml").read_text()


def test_a_failing_hook_of_primus_stops_the_launch_and_is_told(tmp_path: Path) -> None:
    place = checkout(tmp_path, **{"00_check_sh": 'LOG_INFO "looking"\nrequire_command no-such-program "install it"\n'})
    done = train(tmp_path, place)
    assert done.returncode == 1
    assert "00_check.sh failed: exit code 1" in done.stderr
    assert "required command not found: no-such-program. install it" in done.stderr


def test_folders_of_backends_in_a_checkout_of_primus_are_left_to_its_hooks(tmp_path: Path) -> None:
    files = {"train__pretrain__a_sh": "", "train__pretrain__native__b_sh": ""}
    environ = {"PRIMUS_HOOKS": str(checkout(tmp_path, **files)), "XDG_CONFIG_HOME": str(tmp_path)}
    found = discovery.find_hooks("train pretrain", environ, starts_workers=True, framework="native")
    assert [(Path(each.file).name, each.timeout_s) for each in found] == [("a.sh", discovery.PRIMUS_TIMEOUT_S)]
    (tmp_path / "Primus/runner/helpers/execute_hooks.sh").unlink()  # now it is a folder of ours
    found = discovery.find_hooks("train pretrain", environ, starts_workers=True, framework="native")
    assert [(Path(each.file).name, each.timeout_s) for each in found] == [("a.sh", 600), ("b.sh", 600)]


def test_a_hook_whose_work_is_all_that_is_wanted_ends_the_launch_well(tmp_path: Path) -> None:
    place = checkout(tmp_path, **{"00_tune_sh": "echo env.PRIMUS_SKIP_MAIN_LAUNCH=1\n"})
    done = train(tmp_path, place)
    assert done.returncode == 0, done.stderr
    assert "no workers started: PRIMUS_SKIP_MAIN_LAUNCH=1, set by hook:" in done.stdout
    run = next(tmp_path.glob("out*/*/latest")).resolve()
    assert not list(run.glob("logs/rank_*.log"))


def test_nodes_do_not_wait_for_a_lost_node_as_long_as_all_hooks_might_take(tmp_path: Path) -> None:
    place = checkout(tmp_path, **{f"{number:02d}_a_sh": "" for number in range(14)})
    found = discovery.find_hooks("tiny", {"PRIMUS_HOOKS": str(place), "HOME": str(tmp_path)}, starts_workers=True)
    launch: Any = SimpleNamespace(plan=SimpleNamespace(actions=found), engine=None)
    assert len(found) == 14
    assert (
        run_node._choose_rendezvous_timeout_s(launch)
        == run_node.RENDEZVOUS_TIMEOUT_S + discovery.PRIMUS_TIMEOUT_S + 13 * discovery.TIMEOUT_S
    )


WORKS = {
    "a call": "import subprocess\ndef f(): ...\nsubprocess.run(['true'])\n",
    "a call whose result is kept": "import subprocess\ndef f(): ...\nDONE = subprocess.run(['true'])\n",
    "a request whose result is kept": "import requests\ndef f(): ...\nPAGE = requests.get('http://x')\n",
    "a main function": "def main(): ...\nif __name__ == '__main__':\n    main()\n",
    "its own function": "def main(): ...\nRESULT = main()\n",
    "a loop": "def f(): ...\nfor name in ():\n    pass\n",
    "an import alone": "import setup_all\n",
    "nothing": "",
    "no Python": "def (:\n",
}


@pytest.mark.parametrize("text", WORKS.values(), ids=WORKS)
def test_a_python_file_that_does_something_is_a_hook(tmp_path: Path, text: str) -> None:
    environ = {"PRIMUS_HOOKS": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    (tmp_path / "utils.py").write_text(text)
    assert len(discovery.find_hooks("train pretrain", environ, starts_workers=True)) == 1


def test_a_python_file_that_only_defines_is_a_library(tmp_path: Path) -> None:
    environ = {"PRIMUS_HOOKS": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    (tmp_path / "utils.py").write_text(UTILS)
    assert discovery.find_hooks("train pretrain", environ, starts_workers=True) == ()


def bash(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`script` in a shell of its own, as a hook runs."""
    argv = ["bash", str(runner.FUNCTIONS), "bash", "-c", f"set -euo pipefail\n{script}"]
    environ = {"PATH": os.environ["PATH"], **env}
    return subprocess.run(argv, capture_output=True, text=True, env=environ, timeout=30)


FUNCTIONS = {
    "trim '  a b '": "a b\n",
    "join_by , a b c": "a,b,c",
    "parse_key_value a=b=c": "a b=c\n",
    "is_flag --x && echo yes": "yes\n",
    "contains abc b && echo yes": "yes\n",
    "set_default NEW 1; set_default OLD 2; echo $NEW $OLD": "1 old\n",
    "export_and_log NEW 1; printenv NEW": "1\n",
    "run_cmd 'echo a | tr a b'": "b\n",
    "run_cmd_capture 'echo a; echo b >&2'": "a\nb\n",
    "PRINT_INFO_RANK0 text; PRINT_DEBUG hidden": "text\n",
    "get_absolute_path /tmp/../etc": "/etc\n",
    "register_cleanup_hook 'echo ended'; echo begun": "begun\nended\n",
    "bash -c 'trim \" nested \"'": "nested\n",
    "is_slurm_job || echo no": "no\n",
    "(($(get_cpu_count) > 0 && $(get_memory_gb) >= 0)) && echo yes": "yes\n",
}


@pytest.mark.parametrize(("script", "printed"), FUNCTIONS.items(), ids=FUNCTIONS)
def test_a_function_does_what_hooks_of_primus_expect(script: str, printed: str) -> None:
    done = bash(script, OLD="old")
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_levels_and_ranks_decide_what_is_logged() -> None:
    every = "; ".join(f"LOG_{level} {level}" for level in ("DEBUG", "INFO", "SUCCESS", "WARN", "ERROR"))
    shown = {
        level: re.findall(r"\[(\w+)\] \1\n", (done := bash(every, PRIMUS_LOG_LEVEL=level)).stdout + done.stderr)
        for level in ("DEBUG", "INFO", "WARN", "ERROR")
    }
    assert shown == {
        "DEBUG": ["DEBUG", "INFO", "SUCCESS", "WARN", "ERROR"],
        "INFO": ["INFO", "SUCCESS", "WARN", "ERROR"],
        "WARN": ["WARN", "ERROR"],
        "ERROR": ["ERROR"],
    }
    assert bash("LOG_INFO_RANK0 text; LOG_INFO_RANK0 text", NODE_RANK="1").stdout == ""


def test_an_env_file_is_read_without_quotes_and_comments(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("# a comment\nA=1\nB='two words'\n\n")
    assert bash(f"load_env_file {tmp_path}/env; printenv A B").stdout == "1\ntwo words\n"
    assert bash(f"load_env_file {tmp_path}/none").returncode == 1


# -- the folder of a checkout, where there is one --


def primus() -> Path:
    return Path(CHECKOUT) if CHECKOUT else pytest.skip("$PRIMUS_TEST_PRIMUS_CHECKOUT names no checkout")


def test_every_function_that_primus_exports_is_there() -> None:
    text = (primus() / "runner/lib/common.sh").read_text()
    names = [name for line in re.findall(r"^export -f (.*)$", text, re.MULTILINE) for name in line.split()]
    public = [name for name in names if not name.startswith("_")]
    assert len(public) > 30
    done = bash("\n".join(f"declare -F {name} >/dev/null || echo {name}" for name in public))
    assert (done.returncode, done.stdout) == (0, "")


def test_the_folder_of_a_checkout_runs_unchanged(tmp_path: Path) -> None:
    copy = tmp_path / "Primus"
    shutil.copytree(primus() / "runner", copy / "runner")
    fake = tmp_path / "bin"
    fake.mkdir()
    for name in ("pip", "pip3", "apt", "apt-get"):
        (fake / name).write_text("#!/bin/sh\nexit 0\n")
        (fake / name).chmod(0o755)
    path = f"{fake}:{os.environ['PATH']}"
    done = train(tmp_path, copy / "runner/helpers/hooks", PATH=path, PRIMUS_DETERMINISTIC="1")
    assert done.returncode == 0, done.stderr
    logs = hook_logs(tmp_path)
    assert len(logs) >= 14 and "before_utils" not in logs
    assert "env.NCCL_ALGO=Ring" in logs["before_05_deterministic"]
