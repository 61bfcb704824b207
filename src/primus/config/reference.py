"""The schema as JSON Schema for editors, and as the reference of all keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypedDict, get_args

import msgspec

from primus import registry
from primus.config.docs import read_field_docs, read_summary
from primus.config.experiment_file import ExperimentFile, ModuleFile
from primus.config.load import find_translator
from primus.config.model_spec import LARGEST
from primus.config.schema import GROUPS, OWNERS, ConfigGroup, Stage
from primus.config.schema_keys import ZERO_IS_NONE, list_switch_keys, needs_value
from primus.config.source import format_yaml_value
from primus.config.translation.foreign_settings import VARIABLE
from primus.framework import FRAMEWORKS

SCHEMA_PATH = "schemas/primus.schema.json"
"""The schema of the package's own frameworks, below the address of the site."""


class PropertySchema(TypedDict, total=False):
    """JSON Schema of one key."""

    type: str
    description: str
    anyOf: list[Mapping[str, object]]
    default: object


def format_json_schema(framework: str | None = None) -> dict[str, object]:
    """JSON Schema (2020-12) of an experiment file as users write it.

    Args:
        framework: Framework whose own settings may stand among the overrides; those of all frameworks when None.

    Raises:
        UsageError: No such framework.
    """
    settings: dict[str, PropertySchema] = {
        "backend_args": {"type": "object", "description": "Settings of one framework alone."}
    }
    definitions: dict[str, object] = {}
    for group in GROUPS.values():
        properties, used = _describe_properties(group)
        settings |= properties
        definitions |= used
    for name in registry.list_plug_ins("frameworks") if framework is None else [framework]:
        _add_engine_settings(settings, name.replace("-", "_"))
    module: dict[str, object] = dict(_describe_properties(ModuleFile)[0])
    module["overrides"] = {
        "type": ["object", "null"],
        "properties": settings,
        "patternProperties": {f"^{VARIABLE.pattern}$": {"description": "A variable, as some files of Primus have it."}},
        "additionalProperties": False,
    }
    module["trainer_class"] = {"description": "Trainer of Primus, which is chosen by the module here."}
    top: dict[str, object] = dict(_describe_properties(ExperimentFile)[0])
    top["platform"] = {"description": "Platform of Primus; the launcher sets its own variables."}
    for block in ("peft", "model"):
        top[block] = {"type": "object", "description": "Settings of Megatron-Bridge that Primus writes here."}
    definitions["module"] = {"type": "object", "properties": module, "additionalProperties": False}
    top["modules"] = {
        "type": "object",
        "properties": {stage: {"$ref": "#/$defs/module"} for stage in get_args(Stage)},
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "primus experiment",
        "type": "object",
        "properties": top,
        "additionalProperties": False,
        # What a file leaves out, one that it extends may have.
        "if": {"not": {"required": ["extends"]}},
        "then": {
            "required": ["modules"],
            "properties": {"modules": {"additionalProperties": {"required": ["model"]}}},
        },
        "$defs": definitions,
    }


TRANSLATED_FORMS: dict[str, Mapping[str, object]] = {
    "tokenizer_type": {"type": "string"},
    "moe_layer_freq": {"type": ["string", "array"]},
    "window_size": {"type": ["string", "array"]},
}
"""Further forms of values that are translated for a framework's own files."""


def _add_engine_settings(settings: dict[str, PropertySchema], framework: str) -> None:
    """Let `settings` have the names that a framework takes, with any value."""
    translator = find_translator(framework)
    names = [*registry.load_plug_in(FRAMEWORKS, framework).KEYS, *(translator.list_known_keys() if translator else ())]
    for name, further in TRANSLATED_FORMS.items() if translator else ():
        if further not in settings[name]["anyOf"]:
            settings[name]["anyOf"].append(further)
    for name in names:
        section, dot, _ = name.partition(".")
        if name in OWNERS:
            continue  # a value of the schema's type
        form: Mapping[str, object] = {"type": ["object", "null"]} if dot else {}
        known = settings.setdefault(section, {"description": f"Setting of {framework}.", "anyOf": []})
        if form not in known["anyOf"]:
            known["anyOf"].append(form)


def _describe_properties(group: type[ConfigGroup]) -> tuple[dict[str, PropertySchema], dict[str, object]]:
    """JSON Schema of each field, with `${VAR:default}` allowed for every value."""
    docs = read_field_docs(group)
    (_,), components = msgspec.json.schema_components([group], ref_template="#/$defs/{name}")
    fields = components.pop(group.__name__)["properties"]
    variable = {"type": "string", "pattern": r"\$\{.*\}"}
    properties: dict[str, PropertySchema] = {}
    for name, kind in fields.items():
        forms = [{k: v for k, v in kind.items() if k != "default"}, *_list_other_spellings(name), variable]
        properties[name] = {"description": docs.get(name, ""), "anyOf": forms}
        if "default" in kind:
            properties[name]["default"] = kind["default"]
    return properties, components


def _list_other_spellings(name: str) -> list[Mapping[str, object]]:
    """Values that the loader accepts in addition to the type of a key: 0 and 1 for booleans, null or 0 for none."""
    if name not in OWNERS:
        return []
    found: list[Mapping[str, object]] = [{"enum": [0, 1]}] if name in list_switch_keys() else []
    found += [{"const": 0}] if name in ZERO_IS_NONE else []
    field = next(field for field in msgspec.structs.fields(GROUPS[OWNERS[name]]) if field.name == name)
    found += [{"type": "null"}] if not field.required and not needs_value(field) else []
    return found


def format_markdown() -> str:
    """Every key of every group with its type, default and meaning."""
    blocks = [
        "# Configuration keys",
        (
            "Generated by `primus-cli direct -- config schema --text`. Set a key directly under `overrides:` of an\n"
            "experiment file, in a preset, or on the command line (`--train_iters 10`)."
        ),
    ]
    for name, group in GROUPS.items():
        blocks.append(f"## {name}\n\n{read_summary(group)}\n\n{_format_table(group)}")
    return "\n\n".join(blocks)


def _format_table(group: type[ConfigGroup]) -> str:
    docs = read_field_docs(group)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(group):
        default = "required" if field.required else f"`{format_yaml_value(field.default)}`"
        rows.append(f"| `{field.name}` | {type_name(field.type)} | {default} | {docs.get(field.name, '')} |")
    return "\n".join(rows)


def type_name(kind: Any) -> str:
    """A field's type, human-readable: ``integer >= 1 or null``."""
    schema = msgspec.json.schema(kind)
    return " or ".join(_name_kind(option) for option in schema.get("anyOf", [schema]))


def _name_kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_name_kind(option) for option in schema["anyOf"])
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[key]:g}" for key, sign in bounds.items() if schema.get(key, LARGEST) < LARGEST]
    name = re.sub("^array$", "list", schema.get("type", "any"))
    return " ".join([name, " and ".join(limits)]).strip()
