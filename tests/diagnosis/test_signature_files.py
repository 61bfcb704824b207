"""Signature files: defaults, extends, alternatives, checks with file and line, the user's folder, and the cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from primus.cli.main import main
from primus.diagnosis import signature_files
from primus.diagnosis.diagnose import diagnose_logs
from primus.diagnosis.signature import SignatureTable
from primus.errors import UsageError

GIZMO = """\
defaults:
  action: exclude
  systems: [AMD]
alternatives:
  part: gizmo|widget
  code: {7: jammed, 9: on fire}
signatures:
  gizmo-jammed:
    cause: a gizmo is jammed
    fix: free the gizmo
    source: acme.example
    patterns:
      - {text: 'code ', regex: '^(<part>) code (<code>)$'}
  widget-jammed:
    extends: gizmo-jammed
    cause: a widget is jammed
    exit_codes: [77]
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user's signature files; the cache is empty."""
    folder = tmp_path / "plug-ins" / "signatures"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PRIMUS_PLUGINS", str(folder.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def load_fresh() -> SignatureTable:
    signature_files._load_table.cache_clear()
    try:
        return signature_files.load_signatures()
    finally:
        signature_files._load_table.cache_clear()


def test_a_file_of_the_user_adds_signatures_with_defaults_and_alternatives(users: Path) -> None:
    (users / "acme.yaml").write_text(GIZMO)
    table = load_fresh()
    gizmo, widget = table.by_name["gizmo-jammed"], table.by_name["widget-jammed"]
    assert (gizmo.action, gizmo.systems, gizmo.role) == ("exclude", ("AMD",), "root")
    assert gizmo.matches("gizmo code 7") and gizmo.matches("widget code 9") and not gizmo.matches("gizmo code 8")
    assert (widget.fix, widget.action, widget.patterns) == ("free the gizmo", "exclude", ())
    assert table.by_exit_code[77] is widget and "gpu-out-of-memory" in table.by_name


def test_a_file_of_the_user_adds_patterns_to_a_known_signature(users: Path) -> None:
    added = "signatures:\n  disk-full:\n    extends: disk-full\n    patterns: [the tape is full]\n"
    (users / "tape.yaml").write_text(added)
    disk_full = load_fresh().by_name["disk-full"]
    assert disk_full.matches("the tape is full") and disk_full.matches("OSError: [Errno 28] No space left on device")


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("signature: {}", "a.yaml:1: unknown key 'signature'", "signatures"),
        ("signatures:\n  x:\n    casue: y", "a.yaml:3: unknown key 'casue'", "cause"),
        ("signatures:\n  x:\n    cause: y\n    fix: z\n    action: restart", "a.yaml:5: action: 'restart'", "retry"),
        ("signatures:\n  x:\n    cause: y\n    fix: z\n    count: many", "a.yaml:5: count: Expected `int`", ""),
        ("signatures:\n  x:\n    cause: y", "a.yaml:3: signature 'x' has no fix", ""),
        ("signatures:\n  disk-full:\n    cause: y\n    fix: z", "signature 'disk-full' exists", "extends: disk-full"),
        ("signatures:\n  x:\n    extends: disk-ful", "extends 'disk-ful', which does not exist", "disk-full"),
        ("signatures:\n  X y:\n    cause: y", "a.yaml:3: signature 'X y'", "hyphens"),
        (
            "signatures:\n  x:\n    cause: y\n    fix: z\n    patterns: [{text: q, regx: w}]",
            "unknown key 'regx'",
            "regex",
        ),
        (
            "signatures:\n  x:\n    cause: y\n    fix: z\n    patterns:\n    - ''",
            "a.yaml:6: a pattern needs a text",
            "",
        ),
        ("signatures:\n  x:\n    cause: y\n    fix: z\n    patterns: [{text: q, regex: '('}]", "a.yaml:5: regex:", ""),
        ("signatures:\n  x:\n    cause: y\n    fix: z\n    headline: '('", "a.yaml:5: headline:", ""),
        (
            "alternatives: {part: a}\nsignatures:\n  x: {cause: y, fix: z, patterns: [{text: q, regex: <pat>}]}",
            "a.yaml:3: regex: <pat> is not defined",
            "part",
        ),
        ("signatures:\n  x:\n    cause: y\n    fix: z\n    exit_codes: [137]", "exit code 137 already belongs to", ""),
        ("signatures:\n  x: {}\n  x: {}", "a.yaml:3: key 'x' is given twice", ""),
        ("signatures: [x]", "a.yaml:1: expected keys and values", ""),
        ("signatures: {x: [}", "a.yaml:1: not YAML", ""),
    ],
)
def test_a_wrong_file_is_refused_with_its_line_and_the_nearest_name(
    users: Path, text: str, problem: str, hint: str
) -> None:
    (users / "a.yaml").write_text(text)
    with pytest.raises(UsageError) as raised:
        load_fresh()
    assert problem in raised.value.problem and hint in raised.value.hint


def test_a_wrong_file_stops_the_command_but_not_the_diagnosis_of_the_launcher(
    users: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (users / "a.yaml").write_text("signatures: [x]")
    log = tmp_path / "a.log"
    log.write_text("torch.OutOfMemoryError: HIP out of memory.\n")
    found = diagnose_logs([log])
    assert found.cause and found.cause.signature == "gpu-out-of-memory"
    assert any("a.yaml:1: expected keys and values" in note for note in found.notes)
    assert main(["direct", "--", "diagnose", str(log)]) == 2
    assert "a.yaml:1" in capsys.readouterr().err


def test_the_cache_is_used_while_no_file_changes(users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = users / "acme.yaml"
    file.write_text(GIZMO)
    first = load_fresh()
    (cache,) = (tmp_path / "cache" / "primus").glob("signatures-*.msgpack")
    written = cache.stat().st_mtime_ns
    assert load_fresh().signatures == first.signatures and cache.stat().st_mtime_ns == written
    file.write_text(GIZMO.replace("a gizmo is jammed", "a gizmo is stuck"))
    assert load_fresh().by_name["gizmo-jammed"].cause == "a gizmo is stuck"
    cache.write_bytes(b"\x00 damaged")
    assert load_fresh().by_name["gizmo-jammed"].cause == "a gizmo is stuck"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_folder_that_cannot_be_written_is_no_error(users: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    assert "disk-full" in load_fresh().by_name


def test_a_cache_folder_that_is_a_file_is_no_error(users: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    assert "disk-full" in load_fresh().by_name
