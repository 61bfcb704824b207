"""Signatures from YAML files: those of the package, then `signatures/*.yaml` below each folder of `$PRIMUS_PLUGINS`.

A file is a mapping with these keys:

- `signatures`: name to the fields of `Signature`; a pattern is a text, or `{text: ..., regex: ...}`. `extends: NAME`
  takes over the fields of another signature except its patterns and exit codes. A signature that extends itself adds
  patterns and exit codes to the one of that name in an earlier file.
- `defaults`: fields of all signatures of the file.
- `alternatives`: name to a regular expression, or to a mapping whose keys are the alternatives; `<name>` in a regex of
  the file stands for it.

Parsing takes longer than a diagnosis of a small log, and the launcher diagnoses while a job waits. The parsed
signatures are therefore cached in the user's cache folder, keyed by the name, size and time of each file. The cache is
optional: a folder that cannot be written, or a cache of another version, only costs the time to parse.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Struct

from primus import __version__
from primus.diagnosis.signature import SYSTEMS, Layer, Role, Signature, SignaturePattern, SignatureTable, Strength
from primus.errors import PrimusError, UsageError, did_you_mean
from primus.runs.files import write_bytes
from primus.runs.store import Action

PACKAGE = Path(__file__).parent / "signatures"
FILE_KEYS = ("signatures", "defaults", "alternatives")
FIELDS = tuple(field for field in Signature.__struct_fields__ if field != "name")
IDENTITY_FIELDS = ("patterns", "headline", "traceback", "exit_codes")
"""What makes a signature recognizable: never inherited by another one."""
CHOICES: dict[str, Sequence[str]] = {
    "role": get_args(Role),
    "action": get_args(Action),
    "first_action": get_args(Action),
    "strength": get_args(Strength),
    "layer": get_args(Layer),
    "systems": SYSTEMS,
}
_PLACEHOLDER = re.compile(r"(?<!\?P)<([a-z-]+)>")
_NAME = re.compile(r"[a-z]+(-[a-z0-9]+)*")


class _Cache(Struct, array_like=True):
    """The parsed form of a list of files."""

    key: str
    signatures: tuple[Signature, ...]


def load_signatures() -> SignatureTable:
    """All signatures.

    Raises:
        UsageError: A file of the user is wrong; the message names file and line.
    """
    table = get_signature_table()
    if table.problem:
        problem, _, hint = table.problem.partition("\n")
        raise UsageError(problem, hint)
    return table


def get_signature_table() -> SignatureTable:
    """All signatures; only those of the package if a file of the user is wrong.

    A launcher that diagnoses a failure has to decide about a restart: a wrong file must not change that into an error.
    """
    return _load_table(os.environ.get("PRIMUS_PLUGINS", ""))


@functools.cache
def _load_table(plug_ins: str) -> SignatureTable:
    own = sorted(PACKAGE.glob("*.yaml"))
    folders = [Path(os.path.expanduser(root)) / "signatures" for root in plug_ins.split(os.pathsep) if root]
    users = [file for folder in folders for file in sorted(folder.glob("*.yaml"))]
    try:
        return _build_table(_load_files([*own, *users]))
    except UsageError as error:
        if not users:
            raise
        return _build_table(_load_files(own), f"{error.problem}\n{error.hint}")


def _build_table(signatures: Iterable[Signature], problem: str = "") -> SignatureTable:
    all_signatures = tuple(signatures)
    return SignatureTable(
        all_signatures,
        {signature.name: signature for signature in all_signatures},
        {code: signature for signature in all_signatures for code in signature.exit_codes},
        problem,
    )


def _load_files(files: Sequence[Path]) -> Sequence[Signature]:
    key, cache_file = _compute_cache_key(files), _find_cache_file(files)
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        cached = msgspec.msgpack.decode(cache_file.read_bytes(), type=_Cache)
        if cached.key == key:
            return cached.signatures
    signatures = parse_files(files)
    with contextlib.suppress(PrimusError):
        write_bytes(cache_file, msgspec.msgpack.encode(_Cache(key, signatures)))
    return signatures


def _compute_cache_key(files: Sequence[Path]) -> str:
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((__version__, FIELDS, stats)).encode()).hexdigest()


def _find_cache_file(files: Sequence[Path]) -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256("\0".join(map(str, files)).encode()).hexdigest()[:16]
    return Path(folder) / "primus" / f"signatures-{name}.msgpack"


def parse_files(files: Sequence[Path]) -> tuple[Signature, ...]:
    """The signatures of YAML files, checked.

    Raises:
        UsageError: A file is wrong; the message names file and line.
    """
    known: dict[str, dict[str, Any]] = {}
    codes: dict[int, str] = {}
    for file in files:
        for name in _SignatureFile(file, known).read_signatures():
            for code in known[name].get("exit_codes", ()):
                if codes.setdefault(code, name) != name:
                    raise UsageError(f"{file}: {name}: exit code {code} already belongs to {codes[code]}")
    return tuple(Signature(name=name, **fields) for name, fields in known.items())


class _SignatureFile:
    """Reads one file; nodes of the YAML parser know their lines.

    Args:
        file: A YAML file.
        known: Fields of signatures by name, those of earlier files; the file's own are added.
    """

    def __init__(self, file: Path, known: dict[str, dict[str, Any]]) -> None:
        import yaml  # the launcher needs it only if the cache is stale

        self.file = file
        self.known = known
        self.loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(self._read_text())
        self.alternatives: dict[str, str] = {}
        try:
            self.root = self.loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise UsageError(f"{file}:{line}: not YAML: {error.problem}") from None

    def _read_text(self) -> str:
        try:
            return self.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.file}: cannot be read: {error}") from None

    def read_signatures(self) -> Iterator[str]:
        """Add the file's signatures to those that are known, and give their names."""
        top = self._read_keys(self.root, FILE_KEYS)
        self.alternatives = dict(self._read_alternatives(top.get("alternatives")))
        defaults = self._read_fields(top.get("defaults"), FIELDS)[0]
        for name, node in self._read_keys(top.get("signatures"), None).items():
            if not _NAME.fullmatch(name):
                raise self._build_error(
                    node, f"signature '{name}': invalid name", "use lower-case words joined by hyphens"
                )
            self.known[name] = self._read_signature(node, name, defaults)
            yield name

    def _read_signature(self, node: Any, name: str, defaults: dict[str, Any]) -> dict[str, Any]:
        """The fields with those of the parent, else the file's defaults."""
        fields, parent = self._read_fields(node, (*FIELDS, "extends"))
        if name in self.known and parent != name:
            raise self._build_error(node, f"signature '{name}' exists", f"add `extends: {name}` to add patterns to it")
        if parent and parent not in self.known:
            raise self._build_error(
                node, f"{name}: extends '{parent}', which does not exist", did_you_mean(parent, self.known)
            )
        base = self.known[parent] if parent else defaults
        if parent == name:
            added = {key: (*base.get(key, ()), *fields.get(key, ())) for key in ("patterns", "exit_codes")}
            return base | fields | {key: value for key, value in added.items() if value}
        fields = {key: value for key, value in base.items() if key not in IDENTITY_FIELDS} | fields
        missing = next((key for key in ("cause", "fix") if not fields.get(key)), None)
        if missing:
            raise self._build_error(node, f"signature '{name}' has no {missing}")
        return fields

    def _read_fields(self, node: Any, valid: Sequence[str]) -> tuple[dict[str, Any], str]:
        """Checked fields, and the name that `extends` gives."""
        fields: dict[str, Any] = {}
        parent = ""
        for key, value_node in self._read_keys(node, valid).items():
            if key == "extends":
                parent = str(self._construct(value_node))
            elif key == "patterns":
                fields[key] = tuple(self._read_patterns(value_node))
            else:
                fields[key] = self._convert_field(key, value_node)
        return fields, parent

    def _convert_field(self, key: str, node: Any) -> Any:
        value = self._construct(node)
        for word in value if isinstance(value, list) else [value]:
            choices = CHOICES.get(key)
            if choices and word not in choices:
                hint = did_you_mean(str(word), choices) or f"one of {', '.join(choices)}"
                raise self._build_error(node, f"{key}: '{word}' is not valid", hint)
        try:
            converted = msgspec.convert(value, _FIELD_TYPES[key])
        except msgspec.ValidationError as error:
            raise self._build_error(node, f"{key}: {error}") from None
        for regex in converted if key == "facts" else [converted] if key in ("headline", "traceback") else []:
            self._compile_regex(node, key, regex)
        return converted

    def _read_patterns(self, node: Any) -> Iterator[SignaturePattern]:
        if node.id != "sequence":
            raise self._build_error(node, "patterns: expected a list of texts")
        for item in node.value:
            if item.id == "mapping":
                parts = {
                    key: str(self._construct(value)) for key, value in self._read_keys(item, _PATTERN_KEYS).items()
                }
            else:
                parts = {"text": str(self._construct(item))}
            if not parts.get("text", "").strip(" 0123456789"):
                raise self._build_error(item, "a pattern needs a text", "digits are ignored in the search for it")
            yield SignaturePattern(parts["text"], self._expand_regex(item, parts.get("regex", "")))

    def _expand_regex(self, node: Any, regex: str) -> str:
        def replace(found: re.Match[str]) -> str:
            if found[1] not in self.alternatives:
                hint = did_you_mean(found[1], self.alternatives) or "define it below `alternatives`"
                raise self._build_error(node, f"regex: <{found[1]}> is not defined", hint)
            return self.alternatives[found[1]]

        expanded = _PLACEHOLDER.sub(replace, regex)
        self._compile_regex(node, "regex", expanded)
        return expanded

    def _compile_regex(self, node: Any, key: str, regex: str) -> None:
        """Refuse a regular expression of the user that does not compile; a test compiles those of the package."""
        if self.file.is_relative_to(PACKAGE):
            return
        try:
            re.compile(regex)
        except re.error as error:
            raise self._build_error(node, f"{key}: {error}") from None

    def _read_alternatives(self, node: Any) -> Iterator[tuple[str, str]]:
        for name, value in self._read_keys(node, None).items():
            if value.id == "mapping":
                yield name, "|".join(self._read_keys(value, None))
            else:
                yield name, str(self._construct(value))

    def _read_keys(self, node: Any, valid: Sequence[str] | None) -> dict[str, Any]:
        """Keys and value nodes of a mapping; each key is one of `valid`, and is given once."""
        if node is None or (node.id == "scalar" and not node.value):
            return {}
        if node.id != "mapping":
            raise self._build_error(node, f"expected keys and values, found a {node.id}")
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if valid is not None and key not in valid:
                hint = did_you_mean(key, valid) or f"valid keys: {', '.join(valid)}"
                raise self._build_error(key_node, f"unknown key '{key}'", hint)
            if key in found:
                raise self._build_error(key_node, f"key '{key}' is given twice")
            found[key] = value_node
        return found

    def _construct(self, node: Any) -> Any:
        return self.loader.construct_object(node, deep=True)

    def _build_error(self, node: Any, problem: str, hint: str = "") -> UsageError:
        return UsageError(f"{self.file}:{node.start_mark.line + 1}: {problem}", hint)


_PATTERN_KEYS = SignaturePattern.__struct_fields__
_FIELD_TYPES: dict[str, Any] = {
    field.name: field.type for field in msgspec.structs.fields(Signature) if field.name != "patterns"
}
