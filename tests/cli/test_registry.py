"""A function registered as AMD-AGI/Primus registers subcommands is a task of its file's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import cli

FABRIC = """
from primus.cli.registry import register_subcommand

@register_subcommand("{name}")
def {function}(args, unknown_args):
    print(args.command, unknown_args)
    return len(unknown_args)
"""


@pytest.mark.parametrize("function", ["show_fabric", "run"])
def test_the_words_after_the_name_reach_the_function_as_typed(tmp_path: Path, function: str) -> None:
    (tmp_path / "mine/tasks").mkdir(parents=True)
    (tmp_path / "mine/tasks/fabric_map.py").write_text(FABRIC.format(name="fabric-map", function=function))
    words = ["leaf", "--visualize", "--image", "x", "lr=1"]
    done = cli.run("direct", "--", "fabric-map", *words, cwd=tmp_path, PRIMUS_PLUGINS=str(tmp_path / "mine"))
    assert (done.stdout, done.returncode) == (f"fabric-map {words}\n", 5), done.stderr


def test_a_name_that_is_not_that_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine/tasks").mkdir(parents=True)
    (tmp_path / "mine/tasks/fabric.py").write_text(FABRIC.format(name="mesh", function="run"))
    done = cli.run("direct", "--", "fabric", cwd=tmp_path, PRIMUS_PLUGINS=str(tmp_path / "mine"))
    assert done.returncode == 2
    assert "fabric.py: register_subcommand('mesh'): the file has another name" in done.stderr
