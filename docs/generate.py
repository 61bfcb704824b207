"""Write the pages of docs/ that are made from the package itself: `python docs/generate.py`."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from figures import FIGURES
from msgspec import Struct

from primus import registry
from primus.benchmark import Benchmark, BenchmarkRow, MeasuredCall
from primus.callback import CallbackPlugIn
from primus.comparison.results.result import build_json_schema
from primus.config.docs import read_field_docs
from primus.config.extended_files import load_model
from primus.config.schema import ModelSpec
from primus.contract import ContractMember, list_members
from primus.data.source import Source
from primus.diagnosis.signature import Signature
from primus.diagnosis.signature_files import get_signature_table
from primus.engine_keys import format_yaml_value, read_key_rules
from primus.framework import (
    FileExport,
    FileImport,
    Framework,
    FrameworkCheckpoint,
    FrameworkVariables,
    LogFormat,
    SettingsTranslation,
)
from primus.frameworks.maxtext.names import read_settings
from primus.frameworks.torchtitan.backend_settings import find_replacing_keys, list_field_types
from primus.hook import Hook, HookContext, Settings
from primus.models.counts import (
    ParameterCount,
    count_parameters,
    expert_ffn_size,
    flops_per_token,
    head_dim,
    list_layers,
    num_query_groups,
)
from primus.observer import ObserverPlugIn
from primus.patch import PatchPlugIn
from primus.report.charts import select_wide
from primus.reward import Reward
from primus.runtime import JobRuntime, NodeRuntime, Runtime
from primus.task import Task, TaskContext

DOCS = Path(__file__).parent

MODELS_PAGE = """\
# Model presets

<!-- Written by docs/generate.py from src/primus/presets/models; change it there. -->

A model preset is a YAML file of shapes. Start from one with a command that writes an experiment file:

    ./primus-cli direct -- config init llama3.1_8B > my.yaml

Name a preset in an experiment (`model: llama3.1_8B.yaml`); upper and lower case, `-` and `_` make no difference.
Change a shape under `overrides:` or on the command line (`--num_layers 2`), or write your own file that `extends:`
another one.

Parameters are computed from the shapes; tests compare them with the published weights. "Active" parameters are those
that one token uses, including both vocabulary matrices (publishers often leave out the input embedding). GFLOP are
those of one token in training at {sequence} tokens, counted as Megatron-LM does (`causal`: attention halved, windows
ignored).

`framework: native` trains the dense Llama and Qwen models, Mixtral, the mixtures of experts (MoE) of Qwen3,
DeepSeek V2 and V3, Kimi K2 and gpt-oss, Gemma 2 and 3, OLMo 2, Phi-3 and Phi-4. It rejects the others: Llama 4,
Gemma 4, state-space and linear attention; their presets load and are counted. Names ending in `-fp8` set `fp8: e4m3`.

{table}

Heads are query heads / key-value heads x width; for latent attention, query heads x width. Context is the longest
sequence that the model was made for. Shapes follow the `config.json` of the model on the Hugging Face hub.

## Troubleshooting

| message | what to do |
| --- | --- |
| `no model 'NAME'` | Use the suggested name, or put `NAME.yaml` into `models/` of a folder in `$PRIMUS_PLUGINS` |
| `native does not support ...` | Choose a model that native trains (above the table), or another framework |
"""

SEQUENCE = 4096

HEADER = ("preset", "weights", "kind", "parameters", "active", "GFLOP", "layers", "hidden", "feed-forward", "heads",
          "vocabulary", "context")  # fmt: skip


MIXER_NAMES = {
    "window": "windows",
    "mamba": "Mamba-2",
    "gated_delta_net": "gated delta net",
    "kimi_delta": "Kimi delta attention",
    "short_conv": "short convolution",
    "sparse": "compressed attention",
}
"""Mixers other than full attention, for the column `kind`."""


def models_page() -> str:
    """docs/models.md."""
    specs = {name: load_model(name) for name in registry.list_plug_ins("models")}
    ordered = sorted(specs, key=lambda name: (name.partition("_")[0], count_parameters(specs[name]).total_parameters))
    rows = [HEADER, ("---",) * len(HEADER), *(_row(name, specs[name]) for name in ordered)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return MODELS_PAGE.format(sequence=SEQUENCE, table=table)


def _row(name: str, spec: ModelSpec) -> tuple[str, ...]:
    count = count_parameters(spec)
    tied = "" if spec.untie_embeddings_and_output_weights else ", tied"
    return (
        f"`{name}`",
        spec.hf_name or "-",
        _kind(spec) + tied,
        f"{count.total_parameters:,}",
        _active(count),
        f"{flops_per_token(spec, SEQUENCE) / 1e9:.4g}" if spec.max_position_embeddings >= SEQUENCE else "-",
        str(spec.num_layers),
        str(spec.hidden_size),
        _feed_forward(spec),
        _heads(spec),
        str(spec.vocab_size),
        str(spec.max_position_embeddings),
    )


def _kind(spec: ModelSpec) -> str:
    parts = ["MoE"] if spec.num_experts else []
    parts += ["MLA"] if spec.multi_latent_attention else []
    mixers = dict.fromkeys(layer.mixer for layer in list_layers(spec))
    parts += [MIXER_NAMES[mixer] for mixer in mixers if mixer in MIXER_NAMES]
    return " + ".join(parts) or "dense"


def _active(count: ParameterCount) -> str:
    return "-" if count.active_parameters == count.total_parameters else f"{count.active_parameters:,}"


def _feed_forward(spec: ModelSpec) -> str:
    if not spec.num_experts:
        return str(spec.ffn_hidden_size)
    shared = spec.moe_shared_expert_intermediate_size
    routed = f"{spec.moe_router_topk} of {spec.num_experts} x {expert_ffn_size(spec)}"
    return f"{routed} + {shared}" if shared else routed


def _heads(spec: ModelSpec) -> str:
    groups = "" if spec.multi_latent_attention else f" / {num_query_groups(spec)}"
    return f"{spec.num_attention_heads}{groups} x {head_dim(spec)}"


FAILURES_PAGE = """\
# Known failures

<!-- Written by docs/generate.py from src/primus/diagnosis/signatures; change it there. -->

The {number} failure signatures of [`diagnose`](../diagnose.md). **Role**: a root can be the first cause; a symptom
is the cause if nothing else explains it; a cascade follows another failure; info is not a failure by itself.
**Action**: what the launcher does: *retry* restarts,
*exclude* restarts without the node, *stop* does not restart; "retry, then stop" restarts once. **Strength**:
between roots the stronger one is the cause. If several lines are needed, their number follows the patterns.

{tables}
"""

FAILURE_HEADER = ("signature", "cause", "patterns", "role", "action", "strength", "fix", "source")


def failures_page() -> str:
    """docs/reference/failures.md."""
    signatures = get_signature_table().signatures
    systems = list(dict.fromkeys(signature.systems[0] for signature in signatures))
    tables = [_failures_of(system) for system in sorted(systems, key=lambda system: (system != "any", system))]
    return FAILURES_PAGE.format(number=len(signatures), tables="\n\n".join(tables))


def _failures_of(system: str) -> str:
    entries = [signature for signature in get_signature_table().signatures if signature.systems[0] == system]
    rows = [FAILURE_HEADER, ("---",) * len(FAILURE_HEADER), *(_failure_row(signature) for signature in entries)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"## {'Anywhere' if system == 'any' else system}\n\n{table}"


def _failure_row(signature: Signature) -> tuple[str, ...]:
    texts = [_code(text) for text in dict.fromkeys(pattern.text.strip() for pattern in signature.patterns)]
    codes = ", ".join(str(code) for code in signature.exit_codes)
    shown = [*texts, *([f"exit code {codes}"] if codes else [])]
    number = f" ({signature.count} lines)" if signature.count > 1 else ""
    action = signature.action if signature.role == "root" else "-"
    first = f"{signature.first_action}, then " if signature.first_action else ""
    cells = (f"`{signature.name}`", signature.cause, ", ".join(shown) + number, signature.role, first + action)
    weight = signature.strength if signature.role == "root" else "-"
    return (*cells, weight, signature.fix, signature.source)


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{' ' if text.endswith('`') else ''}{fence}".replace("|", "\\|")


PLUG_INS_PAGE = """\
# Plug-ins

<!-- Written by docs/generate.py from the contracts in src/primus and from examples/plug-ins; change it there. -->

Add a task, a runtime, a framework, a dataset, a model or a GPU to `primus-cli` with one file, without changing
the package:

    PRIMUS_PLUGINS=examples/plug-ins ./primus-cli direct -- hello Ann

`PRIMUS_PLUGINS` names folders, separated by `:`. Each holds a folder for each kind of plug-in; the name of a file is
the name that users type. Every file below is in [examples/plug-ins](../examples/plug-ins).

| file | use |
|---|---|
{files}

- Names ignore case, and `-` equals `_`. Files whose names start with `_` or `.` are not plug-ins.
- A task must not have the name of a runtime, such as `slurm`: the word then means the runtime.
- A package (a folder with `__init__.py`) may take the place of a file.
- A framework is one folder, and every part of it is optional: a framework of which only logs are read is a folder with
  `logs.py`. Besides the parts below it may have `keys.yaml` and `packages.yaml`, as the folders of
  [src/primus/frameworks](../src/primus/frameworks) do, and `patches/`.
- A file of yours replaces the package's plug-in of the same name. Earlier folders of `PRIMUS_PLUGINS` come first.
- The first line of the docstring, or the first comment of a YAML file, is the help text. `--help` reads it without
  importing the file.
- An installed package offers plug-ins by entry points of the group `primus.<kind>`, such as `primus.tasks`. A dot in
  the name stands for the space in the name of a task.

## Check a plug-in

    python -m primus.plug_in_check my-plug-ins/runtimes/box.py

The command loads the file, compares its members with the contract of its kind, and checks their types with mypy if it
is installed. Without files it checks every plug-in of `PRIMUS_PLUGINS`. The exit code is 1 if a file fails.

The launcher compares the members as well when it loads a plug-in. A plug-in that lacks a required member, or whose
function takes other arguments, is refused with the file, the member and its signature. A function that returns a value
of another class is reported in the same way when it is called; the types of elements and fields are left to mypy.
Optional members that a file leaves out get the defaults below. Functions take their arguments by position, so you may
name the parameters freely. Hooks and YAML files are checked when they are read.

Errors: raise `primus.errors.UsageError(problem, hint)` for a mistake of the user (exit code 2), `PrimusError` for any
other failure with a known cause (1), `UnfitError` for a machine that cannot run the task (3). The user sees the
problem and the hint. Any other exception is reported with the file and line of the plug-in; `--debug` shows the
traceback.

## Kinds

{kinds}

## Models, trainer presets, GPU models

These plug-ins are YAML files:

{data}

A model holds [model keys](reference/configuration.md#model), a trainer preset holds any keys of an experiment's
`overrides:`. `extends:` names the file that it changes.
[Add a GPU model](environment.md#add-a-gpu-model-an-architecture-or-a-nic) lists the keys of profiles. The folders
`engines`, `images` and `signatures` hold [engines](engines.md#add-an-engine), [image templates](image.md) and [failure
signatures](diagnose.md#add-a-signature). Tokenizers are not plug-ins: name a [tokenizer file](data-tokenizers.md).
"""

EXAMPLES = DOCS.parent / "examples" / "plug-ins"

PLUG_IN_USES = {
    "tasks/hello.py": "`./primus-cli direct -- hello`",
    "tasks/tools/list_ranks.py": "`./primus-cli direct -- tools list-ranks`",
    "runtimes/nice.py": "`./primus-cli nice -- direct -- <task>`",
    "runtimes/background.py": "`./primus-cli background -- direct -- <task>`",
    "runtimes/pbs.py": "`./primus-cli pbs --nodes 2 -- <task>` ([Write a runtime](write-a-runtime.md))",
    "benchmarks/softmax.py": "`benchmark softmax`",
    "callbacks/plateau.py": "`callbacks: [{plateau: {interval: 50}}]` in an experiment",
    "observers/last_step.py": "`observers: last_step` in an experiment",
    "rewards/short.py": "`rewards: {short: 0.1}` in an experiment of `train rl`",
    "sources/haiku.py": "`dataset: haiku` in an experiment, `data prepare --dataset haiku`",
    "patches/host_proc.py": "applied in every worker, listed by `patches list`",
    "frameworks/counting/__init__.py": "`framework: counting` in an experiment",
    "frameworks/counting/translation.py": "its settings `counts` and `stride` in an experiment",
    "frameworks/counting/import_file.py": "`config import counts.yaml`, `config import run.sh`",
    "frameworks/counting/export_file.py": "`config export --to counting`",
    "frameworks/counting/logs.py": "`compare extract` of its logs",
    "frameworks/counting/variables.py": "environment variables for `framework: counting`",
    "hooks/train/01_quiet.py": "runs before every `train` task",
    "models/mine_1B.yaml": "`model: mine_1B` in an experiment",
    "trainers/fast.yaml": "`config: fast` in an experiment",
    "profiles/mi999x.yaml": "a GPU model, `env show --assume mi999x`",
}
"""What each example is for; every example is on a page of plug-ins."""

PLUG_IN_SECTIONS: dict[str, tuple[type, tuple[str, ...], str]] = {
    "Task": (Task, ("tasks/hello.py", "tasks/tools/list_ranks.py"), "A task without workers:|A task with workers:"),
    "Runtime": (Runtime, ("runtimes/nice.py",), ""),
    "Job runtime": (
        JobRuntime,
        ("runtimes/background.py", "runtimes/pbs.py"),
        "Jobs of this machine:|Jobs of a cluster with PBS:",
    ),
    "Runtime that reaches single nodes": (NodeRuntime, (), ""),
    "Benchmark": (Benchmark, ("benchmarks/softmax.py",), ""),
    "Callback": (CallbackPlugIn, ("callbacks/plateau.py",), ""),
    "Observer": (ObserverPlugIn, ("observers/last_step.py",), ""),
    "Reward": (Reward, ("rewards/short.py",), ""),
    "Source": (Source, ("sources/haiku.py",), ""),
    "Patch": (PatchPlugIn, ("patches/host_proc.py",), ""),
    "Framework": (Framework, ("frameworks/counting/__init__.py",), ""),
    "Settings of a framework": (SettingsTranslation, ("frameworks/counting/translation.py",), ""),
    "Files of a framework": (FileImport, ("frameworks/counting/import_file.py",), ""),
    "Files written for a framework": (FileExport, ("frameworks/counting/export_file.py",), ""),
    "Logs of a framework": (LogFormat, ("frameworks/counting/logs.py",), ""),
    "Checkpoints of a framework": (FrameworkCheckpoint, (), ""),
    "Variables of a framework": (FrameworkVariables, ("frameworks/counting/variables.py",), ""),
    "Hook": (Hook, ("hooks/train/01_quiet.py",), ""),
}
"""Contract and examples of each section, with the texts before the examples."""


def plug_ins_page() -> str:
    """docs/plug-ins.md."""
    files = "\n".join(f"| `{file}` | {use} |" for file, use in PLUG_IN_USES.items())
    rows = [
        f"| [{title}]({_plug_in_file(title)}) | {_summarize(parts[0])} |" for title, parts in PLUG_IN_SECTIONS.items()
    ]
    data = "\n\n".join(_example(file, "yaml") for file in PLUG_IN_USES if file.endswith(".yaml"))
    return PLUG_INS_PAGE.format(files=files, kinds=_join_table("| kind | what it is |", rows), data=data)


def _plug_in_file(title: str) -> str:
    return f"plug-ins/{title.lower().replace(' ', '-')}.md"


def _summarize(contract: type) -> str:
    """The first sentence of a contract's docstring."""
    first = " ".join((inspect.getdoc(contract) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[a-z`)])[.:;] ", first)[0].rstrip(".")


def plug_in_page(title: str) -> str:
    """The page of one kind of plug-ins: its contract and its examples."""
    contract, examples, leads = PLUG_IN_SECTIONS[title]
    members = list_members(contract)
    required = [member for member in members if not member.is_optional]
    optional = [member for member in members if member.is_optional]
    source = "<!-- Written by docs/generate.py from the contract and from examples/plug-ins; change it there. -->"
    blocks = [f"# Plug-in: {title}", source, *_paragraphs(inspect.getdoc(contract) or "")]
    blocks += ["[Plug-ins](plug-ins.md) says where the file goes, and how to check it."]
    for lead, file in itertools.zip_longest(leads.split("|") if examples else (), examples, fillvalue=""):
        blocks += [lead, _example(file, "python")] if lead else [_example(file, "python")]
    blocks += [_members_list("Required:", required), _members_list("Optional:", optional)]
    blocks += [_class_table(other) for other in PLUG_IN_VALUES.get(title, ())]
    blocks += [PLUG_IN_NOTES.get(title, "")]
    text = "\n\n".join(block for block in blocks if block) + "\n"
    return re.sub(r"\]\((?=\.\./src/|[\w-]+\.md)", "](../", text)  # docstrings and notes link from docs/


PLUG_IN_NOTES = {
    "Framework": """\
| `attempt` | |
|---|---|
| `rank`, `local_rank`, `world_size` | this process among all processes of the run |
| `run`, `number` | the run folder, and which attempt of the run this is, from 0 |
| `say(text)` | print a line: rank 0's reaches the terminal, each rank's its log |
| `event(kind, **fields)` | append to `events.jsonl`; rank 0 only, the other ranks' calls do nothing |
| `beat(phase, step=0, timings=None)` | heartbeat; `step` is the last finished step, `timings` maps `step_time_s` and \
`compute_time_s` to seconds of that step, by which stragglers are found |
| `stop_signal` | name of the signal that asks to save and exit; None before |

`phase` is `init`, `data`, `compile`, `train`, `eval`, `test`, `checkpoint`, `profile` or `exit`. A rank that calls
`beat` less often than the [hang timeout](supervision.md) is reported as hung: call it at each step and where a phase
starts.""",
    "Benchmark": """\
| `context` | |
|---|---|
| `measure(case, make_call, modes=())` | rows of a case: calls `make_call(mode)` for each cache state, warms up, times \
the `MeasuredCall` until its median is known within `--precision`; an exception becomes the row's `problem` |
| `count_sets(set_bytes, mode)` | how many sets of operands exceed the cache; refuses what does not fit memory |
| `device`, `rank`, `local_rank`, `world_size`, `num_local` | this process |
| `wait_for_all(what)`, `limit_time(what)` | for a benchmark that times by itself, without `measure` |
| `modes`, `cache_bytes`, `is_quick` | cache states to measure, size of the last-level cache, whether to be brief |""",
    "Callback": "[Callbacks](training.md#callbacks) lists the methods of `Callback` and when each is called.",
    "Observer": "[Watch runs](watching.md) describes the observers of the package.",
    "Source": "[Data sources](data-sources.md) describes `HubDataset` and the datasets of the package.",
    "Patch": "[Patches](patches.md) describes which patches are applied, and patch files of a single launch.",
    "Checkpoints of a framework": (
        "The package has examples: [native](../src/primus/frameworks/native/checkpoint.py),\n"
        "[megatron](../src/primus/frameworks/megatron/checkpoint.py)."
    ),
    "Hook": "[Hooks](hooks.md) describes folders, order and shell scripts.",
}
"""What follows the members of a contract."""

PLUG_IN_VALUES: dict[str, tuple[type[Struct], ...]] = {
    "Task": (TaskContext,),
    "Benchmark": (MeasuredCall, BenchmarkRow),
    "Hook": (HookContext, Settings),
}
"""Classes that plug-ins receive or return, whose fields the page lists."""


def _members_list(lead: str, members: Sequence[ContractMember]) -> str:
    if not members:
        return ""
    rows = [f"- `{member.format_signature()}`: {_describe_member(member)}" for member in members]
    return "\n".join([lead, "", *(_wrap(row, indent="  ") for row in rows)])


def _describe_member(member: ContractMember) -> str:
    """The docstring; of a function that is a property, without the head that names its parameters."""
    text = re.sub(r"^Function `[^`]*` that ", "", member.documentation)
    return text[:1].upper() + text[1:] if text[:1].isalpha() else text


def _class_table(struct: type[Struct]) -> str:
    rows = [f"| `{name}` | {text} |" for name, text in read_field_docs(struct).items()]
    return "\n".join([f"| `{struct.__name__}` | |", "|---|---|", *rows])


def _example(file: str, language: str) -> str:
    text = (EXAMPLES / file).read_text(encoding="utf-8").strip()
    return f"`{file}`:\n\n```{language}\n{text}\n```"


def _paragraphs(text: str) -> list[str]:
    return [_wrap(paragraph) for paragraph in text.split("\n\n")]


def _wrap(text: str, indent: str = "") -> str:
    words = " ".join(text.split())
    return textwrap.fill(words, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


ENGINE_PAGE = """\
# Keys of {title}

<!-- Written by docs/generate.py from src/primus/frameworks/{name}/*.yaml; change it there. -->

{intro}

## Keys

{keys}

## Not supported

These keys accept only their default, and the values in the last column:

{refused}

## Settings of `backend_args`

{settings}
"""


def engine_page(name: str, title: str) -> str:
    """The keys of a framework that drives an engine, as tables."""
    folder = DOCS.parent / "src/primus/frameworks" / name
    rules = read_key_rules(folder)
    applied = [
        f"| `{key}` | `{rule.field}` | {'; '.join(text for text in (rule.differs, rule.note) if text)} |"
        for key, rule in rules.items()
        if rule.field
    ]
    refused = [
        f"| `{key}` | {rule.refused} | {', '.join(map(format_yaml_value, rule.accepts))} |"
        for key, rule in rules.items()
        if rule.refused
    ]
    guide = f"../engine-{name.replace('_', '-')}.md"
    intro = (
        f"How [`framework: {name}`]({guide}) applies each key of an experiment. Keys that are not listed are applied"
        " by primus itself, in the same way for every framework."
    )
    return ENGINE_PAGE.format(
        intro=_wrap(intro),
        name=name,
        title=title,
        keys=_join_table("| key | field | |", applied),
        refused=_join_table("| key | not supported | also accepted |", refused),
        settings=SETTINGS_OF.get(name, partial(_settings_of, folder))(),
    )


def _settings_of(folder: Path) -> str:
    if not (folder / "settings.yaml").is_file():
        return "None."
    settings = yaml.safe_load((folder / "settings.yaml").read_text(encoding="utf-8"))
    return _join_table(
        "| setting | field | type | |",
        [
            f"| `{key}` | `{each['field']}` | {each['type']} | {_describe_setting(each)} |"
            for key, each in settings.items()
        ],
    )


def _describe_setting(setting: Mapping[str, Any]) -> str:
    needed = {"transformer_engine": "ignored without Transformer Engine", "gpu": "ignored without a GPU"}
    values = " and ".join(f"`{value}`" for value in setting.get("values", []))
    condition = needed.get(setting.get("needs", ""), "")
    return "; ".join(filter(None, [setting.get("note", ""), f"{values} {condition}".strip()]))


def _settings_of_torchtitan() -> str:
    """The fields of its own tree that no key of an experiment sets."""
    fields = {path: field for path, field in list_field_types().items() if not find_replacing_keys(path)}
    return _join_table(
        "| field | accepts |", [f"| `{path}` | {field.format_accepted()} |" for path, field in sorted(fields.items())]
    )


def _settings_of_maxtext() -> str:
    """Settings of base.yml that no key of an experiment sets and that change the training or its speed."""
    mapped = {rule.field for rule in read_key_rules(DOCS.parent / "src/primus/frameworks/maxtext").values()}
    rows = [
        f"| `{name}` | `{'' if key.default is None else key.default}` | {key.effect} |"
        for name, key in read_settings().keys.items()
        if key.effect in ("numbers", "speed") and not key.gone and name not in mapped
    ]
    return _join_table("| setting | default | changes |", rows)


SETTINGS_OF: dict[str, Callable[[], str]] = {"torchtitan": _settings_of_torchtitan, "maxtext": _settings_of_maxtext}


def _join_table(head: str, rows: Sequence[str]) -> str:
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *rows])


def comparison_result_schema() -> str:
    """docs/reference/comparison-result.schema.json."""
    return json.dumps(build_json_schema(), indent=2) + "\n"


DOCUMENTS_PAGE = """\
# The documents, command by command

<!-- Written by docs/generate.py from tests/guides/documents.yaml; change it there. -->

What the published documents of Primus and Primus-Rival show, as typed there, and what happens here. A test runs each
command, dry where it needs a cluster, a container or a GPU, and looks at a real run for the files.
"""


def documents_page() -> str:
    """docs/documents.md."""
    documents = yaml.safe_load((DOCS.parent / "tests/guides/documents.yaml").read_text(encoding="utf-8"))
    return "\n".join([DOCUMENTS_PAGE, *map(_format_document, documents)])


def _format_document(document: Mapping[str, Any]) -> str:
    commands = [f"| {_format_code(each['run'])} | {_describe_command(each)} |" for each in document["commands"]]
    names = [f"| {_format_code(each['name'])} | {each['here']} |" for each in document.get("names", [])]
    parts = [f"## {document['title']}", document.get("note", ""), _join_table("| command | here |", commands)]
    parts += [_join_table("| file or variable | here |", names)] if names else []
    return "\n\n".join(filter(None, parts)) + "\n"


def _describe_command(command: Mapping[str, Any]) -> str:
    if "here" in command:
        return str(command["here"])
    if "instead" in command:
        return f"type {_format_code(command['instead'])}"
    return (
        f"exit code {command['exit']}; the message says {_format_code(command['says'])}"
        if "exit" in command
        else "works as typed"
    )


def _format_code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


TROUBLESHOOTING_PAGE = """\
# Troubleshooting index

<!-- Written by docs/generate.py from src/primus/diagnosis/signatures and from the tables "Troubleshooting" of the other
pages; change it there. -->

From what you see to its cause, its fix and the page about it. A run that failed names its cause itself:

    ./primus-cli direct -- diagnose quickstart

`diagnose` also reads the log of any launcher ([diagnosis](diagnose.md)). Below, search for a part of the message.

## Messages of primus

{messages}

{failures}
"""
SYMPTOMS_PER_ROW = 4
"""Patterns of a signature that the index shows; docs/reference/failures.md has all."""
PAGE_OF_SYSTEM = {
    "Slurm": "slurm.md",
    "Kubernetes": "kubernetes.md",
    "apptainer": "container.md",
    "containers": "container.md",
    "Megatron": "engine-megatron.md",
    "JAX": "engine-jax.md",
    "Hugging Face": "data-sources.md",
    "torchrun": "supervision.md",
    "RDMA": "preflight.md",
    "EFA": "environment.md",
    "gloo": "environment.md",
    "AMD": "preflight.md",
    "NVIDIA": "preflight.md",
    "NFS": "run-folder.md",
    "primus": "supervision.md",
    "any": "diagnose.md",
}
"""Where to read about failures of a system."""
PAGE_OF_GROUP = {
    "cluster": "ssh.md",
    "communication": "environment.md",
    "exit_codes": "supervision.md",
    "host": "preflight.md",
    "kernel": "nodes.md",
    "software": "install.md",
    "training": "training.md",
}
"""Where to read about failures of no single system, by the file of the signature."""
GROUP_TITLES = {
    "training": "Training",
    "gpu": "GPUs",
    "communication": "Communication between processes",
    "cluster": "Slurm, Kubernetes, containers and ssh",
    "launching": "Launch and supervision",
    "host": "The host",
    "software": "Software",
    "kernel": "Messages of the kernel",
    "xid": "Xid errors of NVIDIA GPUs",
    "exit_codes": "Exit codes and signals",
}
"""Heading of the failures of each file of signatures, in the order of the page."""


def troubleshooting_page() -> str:
    """docs/troubleshooting.md."""
    messages = [row for page in sorted(DOCS.glob("*.md")) for row in _list_troubleshooting(page)]
    folder = DOCS.parent / "src/primus/diagnosis/signatures"
    signatures = {signature.name: signature for signature in get_signature_table().signatures}
    tables = []
    for group, title in GROUP_TITLES.items():
        names = yaml.safe_load((folder / f"{group}.yaml").read_text(encoding="utf-8"))["signatures"]
        rows = [_symptom_row(signatures[name], group) for name in names if signatures[name].role in ("root", "symptom")]
        tables.append(f"## {title}\n\n" + _join_table("| what you see | cause | fix | page |", rows))
    head = "| what you see | cause and fix | page |"
    return TROUBLESHOOTING_PAGE.format(messages=_join_table(head, messages), failures="\n\n".join(tables))


def _list_troubleshooting(page: Path) -> list[str]:
    """Rows of the table below a page's heading "Troubleshooting", each with a link to it."""
    text = page.read_text(encoding="utf-8")
    title = re.search(r"^# (.*)", text, flags=re.MULTILINE)
    found = re.search(r"^## (Troubleshooting.*?)$(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    if not found or not title:
        return []
    anchor = re.sub(r"[^\w\- ]", "", found[1].lower()).replace(" ", "-")
    rows = [line for line in found[2].splitlines() if line.startswith("|") and not re.match(r"\| ?-", line)]
    return [f"{row.rstrip()} [{title[1]}]({page.name}#{anchor}) |" for row in rows[1:]]


def _symptom_row(signature: Signature, group: str) -> str:
    system = signature.systems[0]
    page = PAGE_OF_GROUP.get(group, PAGE_OF_SYSTEM[system]) if system == "any" else PAGE_OF_SYSTEM[system]
    title = (DOCS / page).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    texts = [_code(text) for text in dict.fromkeys(pattern.text.strip() for pattern in signature.patterns)]
    texts = texts[:SYMPTOMS_PER_ROW] or [f"exit code {code}" for code in signature.exit_codes] or ["an exception"]
    return f"| {', '.join(texts)} | {signature.cause} | {signature.fix} | [{title}]({page}) |"


FIGURES_PAGE = """\
# Measured figures

<!-- Written by docs/generate.py from benchmarks/results; change docs/figures.py. -->

Every chart is drawn from a record in `benchmarks/results`, and says when and where it was measured. Blue is primus,
grey is what it was measured against. All were measured on CPUs; no figure of a GPU is published yet.
[Benchmarks](../benchmarks/README.md) describes each measurement, with the cases that are not drawn here and those in
which primus is slower. `make bench` repeats them.

{figures}
"""


def figures_page() -> str:
    """docs/figures.md."""
    parts = [
        f"## {figure.title}\n\n![{figure.title}](pictures/figures/{name}.svg)\n\n{_wrap(figure.describe())}"
        for name, figure in FIGURES.items()
    ]
    return FIGURES_PAGE.format(figures="\n\n".join(parts))


PAGES = {
    "documents.md": documents_page,
    "models.md": models_page,
    "reference/failures.md": failures_page,
    "figures.md": figures_page,
    **{
        f"pictures/figures/{name}.svg": lambda figure=figure: select_wide(figure.draw()) + "\n"
        for name, figure in FIGURES.items()
    },
    "plug-ins.md": plug_ins_page,
    **{_plug_in_file(title): partial(plug_in_page, title) for title in PLUG_IN_SECTIONS},
    "reference/comparison-result.schema.json": comparison_result_schema,
    "reference/engine-huggingface.md": lambda: engine_page("huggingface", "Hugging Face Transformers"),
    "reference/engine-jax.md": lambda: engine_page("jax", "JAX"),
    "reference/engine-maxtext.md": lambda: engine_page("maxtext", "MaxText"),
    "reference/engine-megatron.md": lambda: engine_page("megatron", "Megatron"),
    "reference/engine-megatron-bridge.md": lambda: engine_page("megatron_bridge", "Megatron-Bridge"),
    "reference/engine-torchtitan.md": lambda: engine_page("torchtitan", "TorchTitan"),
    "troubleshooting.md": troubleshooting_page,  # last: it reads the other pages
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / name).write_text(page(), encoding="utf-8")
