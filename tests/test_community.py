"""The files for GitHub: workflows call the doors of the repository, and issue forms ask for what exists."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from primus import registry
from primus.launch.command import parse_command

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
ELEMENTS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
"""Types of a form's elements (docs.github.com, "Syntax for GitHub's form schema")."""


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_valid_and_asks_for_the_report_of_the_machine(path: Path) -> None:
    form = read(path)
    assert form.keys() <= {"name", "description", "title", "labels", "body"} and form["name"] and form["description"]
    ids = [element["id"] for element in form["body"] if element["type"] != "markdown"]
    assert len(set(ids)) == len(ids)
    for element in form["body"]:
        assert element["type"] in ELEMENTS
        assert "value" in element["attributes"] if element["type"] == "markdown" else element["attributes"]["label"]
    [machine] = [element for element in form["body"] if element.get("id") == "machine"]
    assert "`./primus-cli direct -- env report`" in machine["attributes"]["description"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_the_commands_and_files_that_a_form_names_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    commands = re.findall(r"`\./primus-cli ([^`]+)`", text)
    assert commands
    for command in commands:
        assert parse_command(command.split()).request.task in registry.list_plug_ins("tasks")
    assert [file for file in re.findall(r"blob/main/([\w./-]+)", text) if not (ROOT / file).is_file()] == []


def list_steps(workflow: Any) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_few_rights_and_a_limit(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] in ({"contents": "read"}, {"contents": "write"})
    assert all("timeout-minutes" in job or "needs" in job for job in workflow["jobs"].values())
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in list_steps(workflow) if "uses" in step)


def test_the_workflows_call_the_doors_of_the_repository() -> None:
    commands = {path.stem: [step["run"] for step in list_steps(read(path)) if "run" in step] for path in WORKFLOWS}
    assert commands["checks"] == [".ci/run"] and os.access(ROOT / ".ci/run", os.X_OK)
    assert commands["site"] == ["make site"] and "\nsite:" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "upgrade-notes" in commands["release"][0]
