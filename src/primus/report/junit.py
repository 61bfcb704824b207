"""Test results as JUnit XML, which CI services show."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import NamedTuple


class CheckResult(NamedTuple):
    """One check as a test case."""

    name: str
    message: str
    is_failed: bool = False
    is_undecided: bool = False
    """Reported as skipped."""


def format_junit(suite: str, checks: Sequence[CheckResult]) -> str:
    """The checks as a JUnit report in the form that GitLab, Jenkins and the actions of GitHub read."""
    counts = {
        "tests": len(checks),
        "failures": sum(check.is_failed for check in checks),
        "errors": 0,
        "skipped": sum(check.is_undecided for check in checks),
    }
    root = ElementTree.Element("testsuites")
    parent = ElementTree.SubElement(root, "testsuite", {"name": suite, **{key: str(n) for key, n in counts.items()}})
    for check in checks:
        case = ElementTree.SubElement(parent, "testcase", {"classname": suite, "name": check.name, "time": "0"})
        if check.is_failed or check.is_undecided:
            kind = "failure" if check.is_failed else "skipped"
            ElementTree.SubElement(case, kind, {"message": check.message}).text = check.message
        else:
            ElementTree.SubElement(case, "system-out").text = check.message
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"
