"""Why a step started no launcher, from what Slurm printed into the log of the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.runtimes.slurm.step_errors import StepLog, find_first_error

PYXIS = """\
primus: job 7 starts a step on 1 nodes
slurmstepd-n1: error: pyxis: child 15710 failed with error code: 1
slurmstepd-n1: error: pyxis: failed to create container filesystem for image: /images/absent.sqsh
slurmstepd-n1: error: pyxis: printing enroot log file:
slurmstepd-n1: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
srun: error: n1: task 0: Exited with exit code 1
"""
ABSENT = """\
slurmstepd-gpu-07: error: execve(): /work/primus-cli: No such file or directory
srun: error: gpu-07: task 1: Exited with exit code 2
srun: launch/slurm: _step_signal: Terminating StepId=7.0
"""

UNSHARED = """\
primus-cli: running the primus installed in /opt/primus, not the one of /home/me/primus
primus-cli: /home/me/output/x/1: no such file or folder on n2
  list the runs with: runs list; a job needs the same working folder on all nodes and where you submit it
srun: error: n2: task 1: Exited with exit code 2
slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-28T00:08:46 ***
srun: error: n1: task 0: Terminated
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (PYXIS, "pyxis: failed to create container filesystem for image: /images/absent.sqsh (n1)"),
        (ABSENT, "execve(): /work/primus-cli: No such file or directory (gpu-07)"),
        ("srun: error: n1: task 0: Exited with exit code 1\n", ""),
        (UNSHARED, "/home/me/output/x/1: no such file or folder on n2"),
        ("primus-cli: warning: few cores\n", ""),
        ("srun: fatal: SLURM_MEM_PER_CPU is set twice\n", "SLURM_MEM_PER_CPU is set twice"),
        ("iteration 1: error: 0.5\n", ""),
        ("", ""),
    ],
)
def test_the_first_error_that_is_no_consequence_is_the_reason(text: str, found: str) -> None:
    assert find_first_error(text) == found


def test_only_what_the_step_printed_counts(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab", buffering=0) as file:
        file.write(PYXIS.encode())
        log = StepLog(file.fileno())
        file.write(ABSENT.encode())
        assert log.find_first_error().startswith("execve()")
