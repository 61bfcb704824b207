"""Of a shell's variables only those that are known to be harmless are written with their values."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.redaction import MASK, hide_inherited_value, is_harmless_variable
from primus.redaction.fingerprint import FORM
from primus.runs.replay import NUMERIC_VARIABLES

UNKNOWN = {
    "LDAP_BINDING": "cn=me,hunter2",
    "TEAM_MODE": "fast",
    "VAULT_ROLE": "4711",
    "NOTE": "machine example.com login ann password hunter2",
    "SITE_BLOB": "/9j/4AAQSkZJRgABAQAAAQABAAD",
    "HTTP_PROXY": "http://proxy:3128",
    "HF_ENDPOINTS": "a",
    "NNODES_TEXT": "hunter2",
    "XNCCL_DEBUG": "hunter2",
}
HARMLESS = {
    "NCCL_DEBUG": "WARN",
    "CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-a7b2c3d4-0000-1111-2222-333344445555",
    "SLURM_NODELIST": "gpu-node-[001-032]",
    "PATH": "/nix/store/7rjj86a15146cq1cqvrbvdmhfnh9k2yv-bash/bin:/gone",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "SITE_SWITCH": "On",
    "SITE_NUMBER": "999",
    "SITE_NOTHING": "",
    "MALLOC_ARENA_MAX": "4",
}


@pytest.mark.parametrize(("name", "value"), UNKNOWN.items())
def test_a_variable_that_nobody_knows_is_written_as_a_fingerprint(name: str, value: str) -> None:
    assert not is_harmless_variable(name, value)
    assert FORM.fullmatch(hide_inherited_value(name, value))


@pytest.mark.parametrize(("name", "value"), HARMLESS.items())
def test_a_known_name_or_form_is_written_with_its_value(name: str, value: str) -> None:
    assert is_harmless_variable(name, value)
    assert hide_inherited_value(name, value) == value


def test_a_folder_that_exists_is_harmless_and_one_that_does_not_is_unknown(tmp_path: Path) -> None:
    assert is_harmless_variable("SITE_DATA", f"{tmp_path}:/")
    assert not is_harmless_variable("SITE_DATA", f"{tmp_path}:{tmp_path}/gone")
    assert not is_harmless_variable("SITE_DATA", "tests")


def test_a_random_token_below_a_known_name_is_hidden() -> None:
    assert not is_harmless_variable("NCCL_NOTE", "x,Zm9vYmFyYmF6cXV4MTIz")
    assert is_harmless_variable("NCCL_NOTE", "x,Zm9vYmFyYmF6cXV4MT")
    assert is_harmless_variable("NCCL_NOTE", "abcdefghijklmnopqrstuvwxyz")


def test_the_name_of_a_secret_is_masked_and_never_harmless() -> None:
    assert not is_harmless_variable("NCCL_PASSWORD", "")
    assert hide_inherited_value("NCCL_PASSWORD", "yes") == MASK
    assert hide_inherited_value("MLFLOW_TRACKING_URI", "https://ann:hunter2@h") == f"https://ann:{MASK}@h"


@pytest.mark.parametrize("family", NUMERIC_VARIABLES.pattern.split("(")[1].split(")")[0].split("|"))
def test_a_replay_finds_the_value_of_every_variable_that_changes_numbers(family: str) -> None:
    assert NUMERIC_VARIABLES.fullmatch(f"{family}_MODE")
    assert is_harmless_variable(f"{family}_MODE", "some-value")
