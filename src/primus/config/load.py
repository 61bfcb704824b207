"""Merge an experiment file, its presets and the command line into one resolved Experiment.

Later wins: defaults, model preset, trainer preset, experiment `overrides:`, command line.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
from msgspec import Struct, structs

from primus import registry
from primus.config.convert import DEFAULT, convert_value, find_conversion_problem, find_origin, make_group
from primus.config.experiment_file import MODULE_KEYS, TOP_KEYS, ExperimentFile, ModuleFile
from primus.config.extended_files import (
    extend_tree,
    find_unknown_settings,
    is_usable_file,
    load_extended_file,
    locate_file,
    merge_trees,
    override_tree,
    read_extended_files,
    reject_unknown_settings,
)
from primus.config.overrides import parse_overrides
from primus.config.refused_frameworks import REFUSED_FRAMEWORKS, SPELLINGS, find_refusal
from primus.config.schema import GROUPS, OWNERS, Experiment, Stage, Trainer
from primus.config.source import Leaf, Tree, strip_origins
from primus.config.translation.foreign_settings import LayerContext, Translator
from primus.config.translation.preset_files import find_checkout_preset
from primus.errors import UsageError, did_you_mean, find_nearest
from primus.framework import FRAMEWORKS, TRANSLATIONS
from primus.package_files import EXAMPLE_PREFIX, find_example, name_examples_folder

LONGEST_NAME = 200
"""Maximum length of an experiment's name in bytes; names derived from it must stay below 255, the limit of file
systems."""

SHORT_WARMUP = 10
"""Share of a run shorter than its preset's warm-up, 1 in this many steps, that warms up."""

CHECKOUT_PRESETS = "/primus/configs/"
"""Part of the origin of settings in the presets of a Primus checkout."""
WITHOUT_MODULES = (
    "an experiment file has 'modules:', as config init writes it; config import reads files of Megatron-LM, torchtitan,"
    " MaxText and Hugging Face models"
)
"""Hint for a file of another tool."""
STAGES: tuple[str, ...] = get_args(Stage)
COMMANDS = {"pre_trainer": "train pretrain", "post_trainer": "train posttrain", "rl_trainer": "train rl"}
"""The command that trains a module."""


class Resolved(Struct, frozen=True):
    """An experiment with the origin of each of its values."""

    experiment: Experiment
    origins: dict[str, str]
    """Origin by flat key; variables of `env:` as ``env.NAME``."""
    notes: tuple[str, ...] = ()
    """Warnings about settings that have no effect, or another one than in the framework that they are named after."""


def load_experiment(
    file: Path,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None,
    stage: str | None = None,
    is_resolved: bool = False,
) -> Resolved:
    """Resolve an experiment file.

    The framework that the file names says what its keys and its presets mean; `--framework` changes only the engine.

    Args:
        file: The experiment's YAML, a TOML of torchtitan, or `examples:NAME`.
        overrides: Words of the command line: ``--lr 1e-4``, ``--lr=1e-4``, ``lr=1e-4``, ``--flag``.
        environ: Values for ``${VAR}``; None leaves `${` unchanged.
        stage: Module to take; the file's only one when None.
        is_resolved: Whether the file is one of a run folder, whose keys are those of the schema.

    Raises:
        UsageError: The file, a preset or an override is invalid; all problems of one kind are listed.
    """
    if str(file).startswith(EXAMPLE_PREFIX):
        environ, file = name_examples_folder(environ), find_example(str(file))
    layers, notes = _read_experiment_files(file, environ)
    translator = None if is_resolved else find_translator(_find_framework(layers))
    tree = _merge_files(layers, translator)
    if "modules" not in tree:  # its other keys then identify its format
        _reject_unknown(tree, ExperimentFile.__struct_fields__, "experiment file", otherwise=WITHOUT_MODULES)
    stage = stage or _only_stage(tree, file)
    top, flat = _split_overrides(parse_overrides(overrides, stage)) if overrides else ({}, {})
    module = _find_module(tree, stage, file)
    module |= {key: flat.pop(key) for key in MODULE_KEYS if key in flat and not _is_section(flat[key], translator)}
    notes += _correct_spelling(module)
    framework = _read_framework(module)
    engine_keys = registry.load_plug_in(FRAMEWORKS, framework).KEYS
    engine = None if is_resolved else find_translator(framework)
    if translator:
        translator.check_module(tree, module)
    _reject_unknown(tree, ExperimentFile.__struct_fields__, "experiment file")
    _reject_unknown(module, ModuleFile.__struct_fields__, f"module '{stage}'")
    if "model" not in module:
        raise UsageError(f"{file}: module '{stage}' has no 'model'", "for example 'model: llama3.1_8B.yaml'")
    for each in (translator, engine):
        flat = each.rename(flat) if each else flat
    written = override_tree(_read_subtree(module, "overrides"), flat)
    presets = _load_presets(module, file, environ, translator)
    settings = override_tree(presets.settings, written)
    if stage == "pre_trainer" and translator and translator.is_fine_tuning(settings):
        stage = "post_trainer"
        notes += (f"{file}: the settings of module pre_trainer are those of fine-tuning: trained as {stage}",)
    context = LayerContext(stage=stage, written=frozenset(written), typed=frozenset(flat), model=presets.model)
    settings, found = _translate_settings(settings, context, translator, engine)
    settings, dropped = _drop_unknown_preset_keys(settings, engine_keys)
    trainer, origins = _make_trainer(module, settings, engine_keys, engine or translator)
    trainer, shortened = _shorten_preset_warmup(trainer, origins)
    notes += dropped + shortened
    return structs.replace(_make_experiment(file, tree, top, stage, trainer, origins), notes=(*notes, *found))


def find_translator(framework: str) -> Translator | None:
    """The translation of a framework's settings; None where all of them are those of the schema."""
    if not registry.has_plug_in(TRANSLATIONS.name, framework):
        return None
    return registry.load_plug_in(TRANSLATIONS, framework).create_translator()


def _translate_settings(
    settings: Tree, context: LayerContext, translator: Translator | None, engine: Translator | None
) -> tuple[Tree, tuple[str, ...]]:
    """Settings in the words of the schema, and notes.

    Args:
        settings: The merged settings.
        context: What the translation may know.
        translator: That of the framework that the file names.
        engine: That of the framework that trains, whose own settings the command line may hold.
    """
    notes: tuple[str, ...] = ()
    same = translator is not None and engine is not None and translator.framework == engine.framework
    if translator:
        translated = translator.translate(settings, context)
        settings, notes = translated.settings, translated.notes
        if not same and translated.carried:
            kept = _read_subtree(settings, "backend_args")
            settings = settings | {"backend_args": {k: i for k, i in kept.items() if k not in translated.carried}}
            listed = ", ".join(sorted(translated.carried))
            notes = (*notes, f"settings of {translator.framework} alone, not applied: {listed}")
    tuned = settings.get("compile")
    if translator and not same and isinstance(tuned, Leaf) and _is_preset_origin(tuned.origin):
        settings = {key: item for key, item in settings.items() if key != "compile"}
        notes = (*notes, f"compile of {tuned.origin} is for {translator.framework} alone: not applied")
    if engine and not same:
        translated = engine.translate(settings, structs.replace(context, is_schema=True))
        settings, notes = translated.settings, (*notes, *translated.notes)
    return settings, notes


def _read_experiment_files(file: Path, environ: Mapping[str, str] | None) -> tuple[list[Tree], tuple[str, ...]]:
    """The experiment file and those that it extends, and notes about a file of another framework."""
    if file.suffix.lower() == ".toml":
        from primus.config.imports.read_experiment import read_foreign_experiment  # not for YAML

        found = read_foreign_experiment(file)
        if found:
            return [found.tree], found.notes
    return read_extended_files(file, environ), ()


def _merge_files(layers: list[Tree], translator: Translator | None) -> Tree:
    """The experiment of files that extend each other, with the settings of each renamed."""
    merged: Tree = {}
    for layer in layers:
        if translator:
            for module in _read_subtree(layer, "modules").values():
                if isinstance(module, dict) and isinstance(settings := module.get("overrides"), dict):
                    module["overrides"] = translator.rename(settings)
        merged = extend_tree(merged, layer)
    return merged


def _find_framework(layers: list[Tree]) -> str:
    """The `framework` that the files name; later ones win over those that they extend."""
    name = ""
    for layer in layers:
        for module in _read_subtree(layer, "modules").values():
            item = module.get("framework") if isinstance(module, dict) else None
            name = str(item.value) if isinstance(item, Leaf) else name
    return SPELLINGS.get(name.lower(), name)


def _correct_spelling(module: Tree) -> tuple[str, ...]:
    """Correct the framework of a module; gives a note where it was misspelt."""
    written = module.get("framework")
    name = SPELLINGS.get(str(written.value).lower()) if isinstance(written, Leaf) else None
    if name is None or not isinstance(written, Leaf):
        return ()
    module["framework"] = Leaf(name, written.origin, name)
    return (f"{written.origin}: framework '{written.value}' is read as {name}",)


def _split_overrides(typed: Tree) -> tuple[Tree, Tree]:
    """Overrides of the experiment's own keys, and of its module's."""
    own = (*TOP_KEYS, "env")
    return {k: v for k, v in typed.items() if k in own}, {k: v for k, v in typed.items() if k not in own}


def _only_stage(tree: Tree, file: Path) -> str:
    _reject_unknown_modules(tree)
    modules = list(_read_subtree(tree, "modules"))
    if len(modules) == 1:
        return modules[0]
    raise UsageError(
        f"{file}: 'modules:' must hold one of {', '.join(STAGES)}; it holds {', '.join(modules) or 'none'}"
    )


def _find_module(tree: Tree, stage: str, file: Path) -> Tree:
    _reject_unknown_modules(tree)
    modules = _read_subtree(tree, "modules")
    if stage not in modules:
        hint = f"add 'modules: {{{stage}: {{framework, model, overrides}}}}'"
        others = [f"run '{COMMANDS[name]}', which trains its module '{name}'" for name in modules if name in COMMANDS]
        hint = "; or ".join([*others, hint])
        raise UsageError(f"{file}: no module '{stage}'", hint)
    return dict(_read_subtree(modules, stage))


def _read_framework(module: Tree) -> str:
    """Name of the module's framework.

    Raises:
        UsageError: The framework does not exist. Checked before any key, because the valid keys depend on it.
    """
    framework = module.get("framework", Leaf("native", DEFAULT))
    if not isinstance(framework, Leaf) or not isinstance(framework.value, str):
        raise UsageError(f"{find_origin(framework)}: 'framework' must be the name of a backend")
    name = framework.value
    try:
        registry.find_plug_in_file("frameworks", name)
    except UsageError:
        installed = registry.list_plug_ins("frameworks")
        close = find_nearest(name, [*installed, *REFUSED_FRAMEWORKS])
        refusal = find_refusal(name) or REFUSED_FRAMEWORKS.get(close or "")
        if refusal:
            raise UsageError(f"{framework.origin}: framework '{name}': {refusal.reason}", refusal.remedy) from None
        hint = f"did you mean '{close}'?" if close else "choose one, or add it as a plug-in (docs/plug-ins.md)"
        problem = f"{framework.origin}: no framework '{name}' (installed: {', '.join(installed)})"
        raise UsageError(problem, hint) from None
    return name


def _reject_unknown_modules(tree: Tree) -> None:
    for name, item in _read_subtree(tree, "modules").items():
        if name not in STAGES:
            raise UsageError(f"{find_origin(item)}: unknown module '{name}'", did_you_mean(name, STAGES))


def _read_subtree(tree: Tree, key: str) -> Tree:
    item = tree.get(key, {})
    if isinstance(item, Leaf):
        if item.value is None:
            return {}
        raise UsageError(f"{item.origin}: '{key}' must hold keys and values, not {item.value!r}")
    return item


def _reject_unknown(
    tree: Tree, valid: Sequence[str], what: str, within: str = "overrides", otherwise: str = ""
) -> None:
    for key, item in tree.items():
        if key not in valid:
            from primus.config.key_hints import build_unknown_section_error  # imported only for errors

            raise build_unknown_section_error(key, item, valid, what, within, otherwise)


def _is_section(item: Leaf | Tree, translator: Translator | None) -> bool:
    """Whether the value of a module's key is a section of the framework's settings, such as torchtitan's `model`."""
    return translator is not None and not isinstance(item, Leaf)


class PresetSettings(Struct, frozen=True):
    """Settings of the presets that a module names."""

    settings: Tree
    """The model preset with the trainer preset over it."""
    model: Tree
    """The model preset of the same name here, if the model preset is another framework's."""


def _load_presets(
    module: Tree, file: Path, environ: Mapping[str, str] | None, translator: Translator | None
) -> PresetSettings:
    settings: Tree = {}
    model: Tree = {}
    for key, kind in (("model", "models"), ("config", "trainers")):
        name = module.get(key)
        if isinstance(name, dict):
            raise UsageError(
                f"{find_origin(name)}: '{key}' must be the name of a preset", "its values go under 'overrides:'"
            )
        if name is None or name.value is None:
            continue
        path = _locate_preset(kind, name, file, translator) if translator else locate_file(kind, name, file.parent)
        if translator and kind == "models":
            settings, model = _load_model_preset(path, name, environ, translator)
        else:
            settings = override_tree(settings, load_extended_file(path, environ, kind, translator))
    return PresetSettings(settings, model)


def _locate_preset(kind: str, name: Leaf, file: Path, translator: Translator) -> Path:
    """Find a preset of another framework as `locate_file` does, in the Primus checkout of the experiment first."""
    if not isinstance(name.value, str) or not name.value:
        return locate_file(kind, name, file.parent)
    if is_usable_file(file.parent / name.value, kind):
        return file.parent / name.value
    found = find_checkout_preset(kind, translator.framework, name.value, file)
    if found:
        return found
    try:
        return registry.find_plug_in_file(kind, f"{translator.framework}_{name.value}") or locate_file(
            kind, name, file.parent
        )
    except UsageError:
        return locate_file(kind, name, file.parent)


def _load_model_preset(
    path: Path, name: Leaf, environ: Mapping[str, str] | None, translator: Translator
) -> tuple[Tree, Tree]:
    """Settings of a model preset, and the preset of the same name here.

    A preset whose model the framework's settings do not describe is completed by ours.
    """
    settings = load_extended_file(path, environ, "models", translator)
    if path.is_relative_to(registry.PACKAGE):
        return settings, settings
    ours = translator.find_model_name(settings, str(name.value))
    try:
        file = registry.find_plug_in_file("models", ours)
    except UsageError:
        file = None
    model = load_extended_file(file, environ, "models") if file else {}
    return translator.complete_model(settings, model), model


def _make_trainer(
    module: Tree, settings: Tree, engine_keys: Collection[str], translator: Translator | None
) -> tuple[Trainer, dict[str, str]]:
    reject_unknown_settings(settings, engine_keys, translator)
    origins: dict[str, str] = {}
    groups: dict[str, Any] = {}
    for group in GROUPS:
        groups[group], group_origins = make_group(group, settings)
        origins |= group_origins
    framework = module.get("framework", Leaf("native", DEFAULT))
    assert isinstance(framework, Leaf), "it was looked up"
    origins |= {"framework": framework.origin, "model": find_origin(module["model"])}
    backend_args = merge_trees(
        {key: item for key, item in settings.items() if key in engine_keys and key not in OWNERS},
        _read_subtree(settings, "backend_args"),
    )
    origins |= {f"backend_args.{key}": find_origin(item) for key, item in backend_args.items()}
    return Trainer(framework=str(framework.value), backend_args=strip_origins(backend_args), **groups), origins


def _shorten_preset_warmup(trainer: Trainer, origins: dict[str, str]) -> tuple[Trainer, tuple[str, ...]]:
    """A warm-up of a preset that is as long as the run, or longer, becomes a tenth of it; with a note."""
    optimizer = trainer.optimizer
    origin, warmup = origins.get("lr_warmup_iters", ""), optimizer.lr_warmup_iters
    end = optimizer.lr_decay_iters or trainer.training.train_iters
    if warmup < end or optimizer.lr_warmup_fraction is not None or not _is_preset_origin(origin):
        return trainer, ()
    shorter = max(end // SHORT_WARMUP, 1) if end > 1 else 0
    note = f"lr_warmup_iters {warmup} ({origin}): shortened to {shorter}, as the decay ends at step {end}"
    origins["lr_warmup_iters"] = f"a tenth of the {end} steps"
    return structs.replace(trainer, optimizer=structs.replace(optimizer, lr_warmup_iters=shorter)), (note,)


def _is_preset_origin(origin: str) -> bool:
    return origin.startswith("preset:") or CHECKOUT_PRESETS in origin


def _drop_unknown_preset_keys(settings: Tree, engine_keys: Collection[str]) -> tuple[Tree, tuple[str, ...]]:
    """`settings` without unknown keys of Primus' own presets, whose releases differ; a note lists those that are on."""
    unknown = {
        key: item
        for key, item in find_unknown_settings(settings, engine_keys).items()
        if CHECKOUT_PRESETS in find_origin(item)
    }
    listed = [f"{key} {item.value}" for key, item in unknown.items() if isinstance(item, Leaf) and item.value]
    note = f"unknown settings of Primus' presets, not applied: {', '.join(sorted(listed))}"
    return {key: item for key, item in settings.items() if key not in unknown}, (note,) if listed else ()


def _make_experiment(
    file: Path, tree: Tree, top: Tree, stage: str, trainer: Trainer, origins: dict[str, str]
) -> Resolved:
    fields = {field.name: field for field in structs.fields(Experiment)}
    values: dict[str, Any] = {"exp_name": file.stem}
    for key in TOP_KEYS:
        item = top.get(key, tree.get(key))
        origins[key] = find_origin(item) if item is not None else DEFAULT
        if item is not None:
            try:
                values[key] = convert_value(item, fields[key].type)
            except msgspec.ValidationError as error:
                raise UsageError(
                    f"{find_origin(item)}: {key}: {find_conversion_problem(item, fields[key].type, error)}"
                ) from None
    env = merge_trees(_read_subtree(tree, "env"), _read_subtree(top, "env"))
    for name, item in env.items():
        if not isinstance(item, Leaf) or isinstance(item.value, list):
            raise UsageError(f"{find_origin(item)}: env.{name}: a variable's value must be a scalar")
        if not name or "=" in name or "\0" in name:
            raise UsageError(f"{find_origin(item)}: env: {name!r} is not a valid variable name")
        if "\0" in item.text:
            raise UsageError(f"{find_origin(item)}: env.{name}: a variable cannot hold a NUL character")
    origins |= {f"env.{name}": find_origin(item) for name, item in env.items()}
    values["env"] = {name: _read_variable(item) for name, item in env.items()}
    _check_names({key: values[key] for key in TOP_KEYS if key in values}, origins)
    return Resolved(Experiment(stage=cast(Stage, stage), trainer=trainer, **values), dict(sorted(origins.items())))


def _read_variable(item: Leaf | Tree) -> str:
    assert isinstance(item, Leaf)
    return "" if item.value is None else item.text


def _check_names(experiment: Mapping[str, str], origins: Mapping[str, str]) -> None:
    """Check that the experiment's name is a valid folder name, and that no name contains control characters."""
    for key, value in experiment.items():
        if not value.isprintable():
            raise UsageError(f"{origins[key]}: {key} {value!r} holds a control character", "use printable characters")
    exp_name = experiment["exp_name"]
    if exp_name.startswith("-") or exp_name != exp_name.strip():  # an option, or blanks that nobody sees
        raise UsageError(
            f"{origins['exp_name']}: exp_name {exp_name!r} begins with '-', or begins or ends with a blank",
            "use letters, digits, '.', '_' and '-'",
        )
    if "/" in exp_name or exp_name in ("", ".", "..") or len(os.fsencode(exp_name)) > LONGEST_NAME:
        raise UsageError(
            f"{origins['exp_name']}: exp_name {exp_name!r} cannot name a folder",
            "use letters, digits, '.', '_' and '-'",
        )
