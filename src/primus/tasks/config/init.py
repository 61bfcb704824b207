"""Write a commented experiment file for a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

import primus
from primus import registry
from primus.config import reference, template
from primus.config.extended_files import load_model
from primus.config.flags import Positional
from primus.config.imports.foreign_config import make_model
from primus.config.imports.read_file import read_foreign_file
from primus.config.source import ConfigValue
from primus.errors import UsageError
from primus.runs.files import write_text
from primus.task import TaskContext

SCHEMA_FILE = "primus.schema.json"
"""File beside an experiment with the keys of all frameworks here, plug-ins included: the published one lacks them, and
editors on clusters often reach no network. Relative, so that both can be committed. A file that is printed has no
folder, so it names the published schema."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `config init`."""

    model: Positional
    """Model preset, such as llama3.1_8B; a model file, such as one of `config import`; or a folder of Hugging Face."""
    output: str | None = None
    """Output file, with the schema for editors beside it (default: standard output)."""
    force: bool = False
    """Overwrite an existing file."""
    fit: str | None = None
    """Choose the layout that is predicted to train fastest on these machines: MODEL or MODEL:GPUS, such as mi300x:8."""
    nnodes: Annotated[int, Meta(ge=1)] = 1
    """Fit: number of such machines."""
    batch_tokens: Annotated[int, Meta(ge=1)] = 4_194_304
    """Fit: tokens of an optimizer step."""
    engine: str | None = None
    """Fit: framework that trains (default: native, or the first that can train the model)."""


def run(options: Options, context: TaskContext) -> None:
    """Print or write the starting file.

    Raises:
        UsageError: The model does not exist, the file exists already, or the model fits in no layout.
    """
    if options.fit is None and (options.engine or options.nnodes > 1):
        raise UsageError("--nnodes and --engine choose a layout", "add --fit MODEL:GPUS")
    if options.fit is None:
        text = _format_file(options.model, context.environ)
    else:
        from primus.prediction.layout_request import FitRequest  # searches layouts
        from primus.tasks.config._fit import format_fitted_file

        asked = FitRequest(options.fit, options.nnodes, options.batch_tokens, options.engine)
        text = format_fitted_file(options.model, asked)
    if options.output is None:
        published = f"{primus.SITE_ADDRESS}{reference.SCHEMA_PATH}"
        print(f"# yaml-language-server: $schema={published}\n{text}" if primus.SITE_ADDRESS else text, end="")
        return
    target = Path(options.output)
    if target.exists() and not options.force:
        raise UsageError(f"{target} exists", "--force replaces it")
    schema = target.parent / SCHEMA_FILE
    write_text(schema, json.dumps(reference.format_json_schema()) + "\n")
    write_text(target, f"# yaml-language-server: $schema={SCHEMA_FILE}\n{text}")
    files = {"file": str(target), "schema": str(schema)}
    context.result(files, f"wrote {target}, and for editors {schema}")


def _format_file(model: str, environ: Mapping[str, str]) -> str:
    """The starting file for a preset, a model file, or a folder of Hugging Face with its weights and tokenizer."""
    path = Path(model)
    if path.is_dir() or path.suffix == ".json":
        found = read_foreign_file(path, environ)
        folder = path if path.is_dir() else path.parent
        values: dict[str, ConfigValue] = {}
        if any(folder.glob("*.safetensors")):
            values |= {"load": f"hf:{folder}", "finetune": True}
        if (folder / "tokenizer.json").is_file():
            values["tokenizer_model"] = str(folder)
        return template.format_starting_file(found.name, make_model(found), preset=None, values=values)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return template.format_starting_file(path.stem, load_model(model), preset=model)
    file = registry.find_plug_in_file("models", model)
    return template.format_starting_file(file.stem if file else model, load_model(model))
