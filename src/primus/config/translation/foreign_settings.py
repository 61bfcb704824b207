"""Contract of the translation of another framework's settings, and the settings while they are translated."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct

from primus.config.convert import find_origin
from primus.config.schema import OWNERS
from primus.config.source import Leaf, Tree, parse_scalar
from primus.errors import UsageError

if TYPE_CHECKING:
    from primus.config.translation.known_keys import KnownKey

NEEDED = ("train_iters", "micro_batch_size", "seq_length", "lr")
"""Keys of which null is an error: their default would be a guess."""
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+")
"""Name of an environment variable, which some files of Primus have among the settings."""
DEFAULT_ORIGIN = "'s default"
"""End of the origin of a value that the file does not state."""
MOST_LISTED = 12
"""Number of keys that a note lists; further ones are counted."""


class TranslatedSettings(Struct, frozen=True):
    """Settings in the words of the schema."""

    settings: Tree
    """Keys of the schema and `backend_args`; unknown keys as they were written."""
    notes: tuple[str, ...] = ()
    """Warnings, one line each."""
    carried: frozenset[str] = frozenset()
    """Keys of `backend_args` that the framework's settings became; others are written under that name."""


class LayerContext(Struct, frozen=True, kw_only=True):
    """What a translation may know besides the settings."""

    stage: str
    """Module of the experiment: pre_trainer, post_trainer or sft_trainer."""
    written: frozenset[str] = frozenset()
    """Keys of the experiment file and the command line; all others come from presets."""
    typed: frozenset[str] = frozenset()
    """Keys of the command line."""
    model: Tree = {}
    """The model preset of the same name here; empty if there is none."""
    is_schema: bool = False
    """Whether the settings are those of the schema, except for settings of the engine on the command line."""


class Translator:
    """Translation of one framework's settings; a framework overrides what it has."""

    framework: ClassVar[str]
    """Name of the framework, and of its folders in primus/configs."""

    def check_module(self, tree: Tree, module: Tree) -> None:
        """Remove keys of the experiment file and its module that have no effect here.

        Raises:
            UsageError: A key asks for what no engine does.
        """
        tree.pop("platform", None)  # names of variables that Primus reads; the launcher here sets its own

    def rename(self, settings: Tree) -> Tree:
        """The settings of one file, with keys of the schema where a foreign key has an equivalent one."""
        return settings

    def find_model_name(self, settings: Tree, name: str) -> str:
        """Name of the model preset here that belongs to the framework's model preset `name`."""
        return name

    def complete_model(self, settings: Tree, model: Tree) -> Tree:
        """A model preset of the framework, with what it does not say of its model taken from ours."""
        return settings

    def is_fine_tuning(self, settings: Tree) -> bool:
        """Whether merged settings of a module pre_trainer ask for fine-tuning."""
        return False

    def translate(self, settings: Tree, context: LayerContext) -> TranslatedSettings:
        """The merged settings of all presets, the experiment file and the command line.

        Raises:
            UsageError: A setting asks for what no engine does; the message names the line.
        """
        raise NotImplementedError

    def list_known_keys(self) -> Iterable[str]:
        """All names that an experiment file may use, for the nearest name of a misspelt one."""
        raise NotImplementedError


class ForeignSettings:
    """Settings that rules take away from and add to, until only keys of the schema are left.

    Args:
        settings: The merged settings.
        typed: Keys of the command line, which win over the files' settings of the framework's own words.
        list_value: Gets the name, value and reason of each setting without a key here, for `config import`, which goes
            on without it; None where such a setting is an error.
    """

    def __init__(
        self,
        settings: Tree,
        typed: Collection[str] = (),
        list_value: Callable[[str, Any, str], None] | None = None,
    ) -> None:
        self.tree = dict(settings)
        self._typed = typed
        self._list_value = list_value
        self.backend_args: Tree = {}
        self.notes: list[str] = []
        self.unchanged: list[str] = []
        """Settings that the framework takes as they are written, because they are its defaults."""

    def read(self, key: str, default: Any = None) -> Any:
        """The value of `key`; the default where it is not set or null."""
        item = self.tree.get(key)
        value: Any = item.value if isinstance(item, Leaf) else item
        if isinstance(item, Leaf) and item.typed and isinstance(value, str):
            value = parse_scalar(value)  # a number or a switch in a quoted "${VARIABLE}"
        return default if value is None else value

    def take(self, key: str, default: Any = None) -> Any:
        """The value of `key`, which is removed."""
        value = self.read(key, default)
        self.tree.pop(key, None)
        return value

    def take_number(self, key: str, default: float | None = None) -> float | None:
        """The number of `key`, which is removed.

        Raises:
            UsageError: The value is not a number.
        """
        value = self.read(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise self.refuse(key, f"expected a number ({value!r})", "write a number")
        self.tree.pop(key, None)
        return value

    def find_origin(self, *keys: str) -> str:
        """Origin of the first of `keys` that is set, with its name."""
        for key in keys:
            if key in self.tree:
                return format_origin(find_origin(self.tree[key]), key)
        return "default"

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set a key of the schema, unless the command line has set it; what it set may be translated itself."""
        origin = origin.removesuffix(f" ({key})")
        if key in self._typed and key in self.tree and find_origin(self.tree[key]) != origin:
            return
        # Typed, so that the text of a variable may be a number.
        self.tree[key] = Leaf(value, origin, "" if value is None else str(value), typed=value is not None)

    def drop(self, *keys: str) -> None:
        for key in keys:
            self.tree.pop(key, None)

    def drop_nulls(self) -> None:
        """Remove nulls of schema keys, which mean the default; lengths and learning rates have none that is meant."""
        for key, item in list(self.tree.items()):
            if key in OWNERS and key not in NEEDED and isinstance(item, Leaf) and item.value is None:
                del self.tree[key]

    def finish(self) -> TranslatedSettings:
        """The settings, with what is kept for the engine below the `backend_args` that are written."""
        if self.backend_args:
            given = self.tree.get("backend_args", {})
            self.tree["backend_args"] = {**self.backend_args, **(given if isinstance(given, dict) else {})}
        return TranslatedSettings(self.tree, tuple(self.notes), frozenset(self.backend_args))

    def refuse(self, key: str, problem: str, hint: str) -> UsageError:
        """The error for the value of `key`."""
        return UsageError(f"{find_origin(self.tree[key])}: {key}: {problem}", hint)

    def reject(self, key: str, problem: str, hint: str) -> None:
        """Remove a setting that no engine here follows; an error unless the file is imported."""
        value = self.read(key)
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        if self._list_value is None:
            raise self.refuse(key, f"{shown}: {problem}", hint)
        self.drop(key)
        self._list_value(key, shown, f"{problem}; {hint}")

    def warn(self, key: str, value: Any, reason: str) -> None:
        """Note that a setting has another effect here."""
        if self._list_value is None:
            self.notes.append(f"{key} {value}: {reason}")
        else:
            self._list_value(key, value, reason)

    def drop_unused(self, *keys: str) -> None:
        """Remove settings without an effect on training."""
        for key in keys:
            if self._list_value is not None and self._is_written(key):
                self._list_value(key, self.read(key), "")
            self.drop(key)

    def drop_unchanged(self, *keys: str) -> None:
        """Remove settings that ask for what is done without them."""
        self.unchanged += [key for key in keys if self._is_written(key)]
        self.drop(*keys)

    def _is_written(self, key: str) -> bool:
        return key in self.tree and not find_origin(self.tree[key]).endswith(DEFAULT_ORIGIN)


def is_set(settings: Tree, key: str) -> bool:
    """Whether `key` has another value than null."""
    item = settings.get(key)
    return item is not None and not (isinstance(item, Leaf) and item.value is None)


def format_origin(origin: str, key: str) -> str:
    """`origin` of a value whose key was another one: ``exp.yaml:12 (layernorm_epsilon)``."""
    return origin if origin.endswith((")", f"--{key}")) else f"{origin} ({key})"


def rename_keys(settings: Tree, names: dict[str, str]) -> Tree:
    """`settings` with new names; a null does not replace a value under the new name."""
    renamed: Tree = {}
    for key, item in settings.items():
        name = names.get(key, key)
        if name != key and isinstance(item, Leaf):
            if item.value is None and name in settings:
                continue
            item = Leaf(item.value, format_origin(item.origin, key), item.text, item.typed)
        if name == key and key in renamed and isinstance(item, Leaf) and item.value is None:
            continue
        renamed[name] = item
    return renamed


_CARRIED = {
    "speed": "speed or memory only",
    "report": "reports only",
    "launch": "supervision only",
    "checkpoint": "checkpoint files only",
    "data": "the order of the data, which is the same for all engines",
    "other": "other tasks or optimizers only",
}


def format_ignored_keys(ignored: dict[str, list[str]], problem: str) -> list[str]:
    """One note on keys without effect, by what they would change; none where all have one."""
    listed = [
        f"{format_listed_keys(keys)} ({_CARRIED[effect]})"
        for effect, keys in sorted(ignored.items())
        if effect in _CARRIED
    ]
    return [f"{problem}: {'; '.join(listed)}"] if listed else []


def settle_other_keys(
    work: ForeignSettings,
    context: LayerContext,
    keys: Mapping[str, KnownKey],
    keep: Callable[[ForeignSettings, str, KnownKey, Leaf], bool],
) -> None:
    """Take the framework's keys that no key of the schema replaces out of the tree.

    Args:
        work: The settings; gets a note that lists keys without effect.
        context: Only keys that the user has written are refused or listed.
        keys: What the framework knows.
        keep: Puts a setting where the engine takes it; False if the engine does not.

    Raises:
        UsageError: A setting that changes the training is gone.
    """
    ignored: dict[str, list[str]] = {}
    for key in [key for key in work.tree if key in keys and key not in OWNERS]:
        item, known = work.tree[key], keys[key]
        if not isinstance(item, Leaf) or item.value is None:
            work.drop(key)
        elif item.value == known.default and known.gone:
            work.drop_unused(key)
        elif item.value == known.default:
            work.drop_unchanged(key)
        elif known.gone and known.effect == "numbers" and key in context.written:
            work.reject(key, known.gone, "remove it")
        elif keep(work, key, known, item):
            work.drop(key)
        else:
            work.drop_unused(key)
            if key in context.written:
                ignored.setdefault(known.effect, []).append(key)
    work.notes += format_ignored_keys(ignored, "no effect here")


def format_listed_keys(keys: Iterable[str]) -> str:
    """Keys for a note: the first ones by name, the rest as a number."""
    listed = sorted(keys)
    shown = ", ".join(listed[:MOST_LISTED])
    more = len(listed) - MOST_LISTED
    return shown + (f" and {more} more" if more > 0 else "")
