"""Recipes: ordered rules with thresholds, and the definition of a word, from a preset or a file of the user.

extends: fineweb
rules:
  gopher_quality: {min_words: 20}
  c4: off
  bad_words: {file: words.txt}
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

import primus
from primus.config import source
from primus.config.source import Leaf, Tree
from primus.config.text_file import format_path
from primus.data.filter.cleaning import words
from primus.data.filter.cleaning.block import DocumentBlock
from primus.data.filter.cleaning.rules import RULES
from primus.data.filter.cleaning.rules.rule import Rule
from primus.errors import UsageError, did_you_mean

VERSION = 1
"""Version of the rules. It changes if the same recipe keeps or changes other documents."""

PRESETS = Path(primus.__file__).parent / "presets" / "cleaning"
KEYS = ("extends", "words", "rules")


class RecipeContent(Struct, frozen=True, kw_only=True):
    """All settings of a recipe that affect the result, as JSON."""

    # In the order of the alphabet, as in the hashes of reports that exist.
    rules: list[dict[str, object]]
    """Name, thresholds and `Rule.identity` of each rule."""
    version: int
    """Version of the rules."""
    words: str
    """Definition of a word."""


@dataclass(frozen=True)
class CleaningRecipe:
    """Rules in order."""

    name: str
    """Name of the preset, or path of the file."""
    words: str
    """Definition of a word; see `primus.data.filter.cleaning.words`."""
    rules: tuple[Rule, ...]

    def start(self) -> None:
        """Load the files and packages of the rules.

        Raises:
            UsageError: A package or a file is missing.
        """
        for rule in self.rules:
            rule.start()

    def apply(self, block: DocumentBlock) -> None:
        """Apply the rules to a block of documents."""
        for rule in self.rules:
            if block.alive.any():
                rule.apply(block)

    def content(self) -> RecipeContent:
        """All settings that affect the result."""
        rules = [{**msgspec.to_builtins(rule, str_keys=True), **rule.identity()} for rule in self.rules]
        return RecipeContent(rules=rules, version=VERSION, words=self.words)

    def fingerprint(self) -> str:
        """Hash of the content."""
        return hashlib.sha256(msgspec.json.encode(self.content(), order="deterministic")).hexdigest()


def list_presets() -> list[str]:
    """List the presets."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def load_recipe(given: str, extra: Sequence[Rule] = ()) -> CleaningRecipe:
    """Load a recipe by the name of a preset or the path of a YAML file.

    Args:
        given: Name or path.
        extra: Rules that precede those of the recipe, and replace its rules of the same name.

    Raises:
        UsageError: The recipe does not exist, or has an unknown rule or threshold, or an invalid value.
    """
    file, tree = _read_recipe(given)
    definition = _parse_words(tree)
    found = tree.get("rules")
    if not isinstance(found, dict) or not found:
        raise UsageError(f"{file}: no rules", f"give them below the key rules: {', '.join(RULES)}")
    rules = [_parse_rule(file, name, value) for name, value in found.items() if not _is_off(value)]
    taken = {rule.name for rule in extra}
    return CleaningRecipe(given, definition, (*extra, *(rule for rule in rules if rule.name not in taken)))


def _read_recipe(given: str, above: tuple[Path, ...] = ()) -> tuple[str, Tree]:
    """Read a recipe: the path of its file for messages, and its content merged over the recipes that it extends."""
    path = _find_recipe_file(given)
    shown = format_path(path)
    if path in above:
        raise UsageError(f"{shown}: it extends itself", "name another recipe")
    tree = source.read_yaml(path, None, shown)
    for key in tree:
        if key not in KEYS:
            raise UsageError(f"{_locate_key(path, key)}: unknown key '{key}'", _suggest_name(key, KEYS))
    rules = tree.get("rules")
    for name in rules if isinstance(rules, dict) else ():
        if name not in RULES:
            raise UsageError(f"{_locate_key(path, name)}: unknown rule '{name}'", _suggest_name(name, RULES))
        _check_thresholds(path, name, rules[name] if isinstance(rules, dict) else {})
    extends = tree.pop("extends", None)
    if extends is None:
        return shown, tree
    if not isinstance(extends, Leaf) or not isinstance(extends.value, str):
        raise UsageError(
            f"{_locate_key(path, 'extends')}: not the name of a recipe", f"valid: {', '.join(list_presets())}"
        )
    _, base = _read_recipe(extends.value, (*above, path))
    return shown, _merge_trees(base, tree)


def _check_thresholds(path: Path, rule: str, value: Tree | Leaf) -> None:
    if isinstance(value, Leaf):
        if value.value not in (None, False, True):
            raise UsageError(f"{value.origin}: rule '{rule}' has thresholds, not a value", "write them below it")
        return
    fields = RULES[rule].__struct_fields__
    for name in value:
        if name not in fields:
            raise UsageError(
                f"{_locate_key(path, name)}: rule '{rule}' has no threshold '{name}'", _suggest_name(name, fields)
            )


def _find_recipe_file(given: str) -> Path:
    path = Path(os.path.expanduser(given))
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path.absolute()
    if given not in list_presets():
        raise UsageError(f"no recipe '{given}'", f"{_suggest_name(given, list_presets())}, or the path of a .yaml file")
    return PRESETS / f"{given}.yaml"


def _merge_trees(base: Tree, own: Tree) -> Tree:
    """Merge `own` over `base`. A rule that is off in `base` and has thresholds in `own` is on."""
    merged = dict(base)
    for key, value in own.items():
        before = merged.get(key)
        merged[key] = _merge_trees(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
        if isinstance(before, dict) and isinstance(value, Leaf) and value.value in (None, True):
            merged[key] = before
    return merged


def _parse_words(tree: Tree) -> str:
    leaf = tree.get("words")
    definition = leaf.value if isinstance(leaf, Leaf) else words.DEFINITIONS[0]
    if definition not in words.DEFINITIONS:
        where = f"{leaf.origin}: " if isinstance(leaf, Leaf) else ""
        raise UsageError(f"{where}words '{definition}'", _suggest_name(str(definition), words.DEFINITIONS))
    return str(definition)


def _is_off(value: Tree | Leaf) -> bool:
    return isinstance(value, Leaf) and value.value is False


def _parse_rule(file: str, name: str, value: Tree | Leaf) -> Rule:
    """Build a rule with its thresholds.

    Raises:
        UsageError: A threshold is invalid.
    """
    thresholds = source.strip_origins(value) if not isinstance(value, Leaf) else {}
    try:
        rule: Rule = msgspec.convert(thresholds, RULES[name], strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        what = re.search(r"`\$\.(\w+)", str(error))
        written = value.get(what[1]) if what and not isinstance(value, Leaf) else None
        where = written.origin if isinstance(written, Leaf) else file
        threshold = f" {what[1]}" if what else ""
        raise UsageError(f"{where}: rule '{name}'{threshold}: {str(error).split(' - at')[0]}") from None
    return rule


def _locate_key(path: Path, key: str) -> str:
    """Find the file and line of a key."""
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if re.search(rf"(^|[\s{{,'\"]){re.escape(key)}['\"]?\s*:", line):
            return f"{format_path(path)}:{number}"
    return format_path(path)


def _suggest_name(given: str, known: Iterable[str]) -> str:
    known = list(known)
    return did_you_mean(given, known) or f"known: {', '.join(known)}"
