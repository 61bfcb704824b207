"""Write the pages of docs/ that are made from the package itself: `python docs/generate.py`."""

from __future__ import annotations

from pathlib import Path

from primus import registry
from primus.config.load import load_model
from primus.config.schema import ModelSpec
from primus.diagnosis.signature import Signature
from primus.diagnosis.signatures import SIGNATURES
from primus.model import (
    ParameterCount,
    count_parameters,
    expert_ffn_size,
    flops_per_token,
    head_dim,
    list_layers,
    num_query_groups,
)

DOCS = Path(__file__).parent

MODELS_PAGE = """\
# Models

<!-- Written by docs/generate.py from src/primus/presets/models; change it there. -->

A model is a YAML file of shapes. Name one in an experiment (`model: llama3.1_8B.yaml`); upper and lower case, `-` and
`_` make no difference. Any shape can be changed under `overrides:` or on the command line (`--num_layers 2`), and a
file of your own may start from another one with `extends:`.

    ./primus-cli direct -- config init llama3.1_8B > my.yaml

Parameters are computed from the shapes, and tests compare them with the published weights. "Active" are those that one
token uses, both vocabulary matrices included (publishers often leave out the input embedding). GFLOP are those of one
token in training at {sequence} tokens, counted as Megatron-LM does (`causal`: attention halved, windows ignored).

`framework: native` trains the dense Llama and Qwen models. The others (mixture of experts, MoE; latent attention, MLA;
state-space and linear attention; Gemma) load and are counted, and `native` refuses them. Names ending in `-fp8` set
`fp8: e4m3`.

{table}

Heads are query heads / key-value heads x width; of latent attention, query heads x width. Context is the longest
sequence that the model was made for. Shapes follow the `config.json` of the model on the Hugging Face hub.
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

What `diagnose` recognises ([how](../diagnose.md)): {number} signatures. **Role**: a root can be the first cause; a
cascade follows another failure; info is none by itself. **Action**: what the launcher does: *retry* starts again,
*exclude* without the node, *stop* not at all; "retry, then stop" tries once. **Weight**: between roots the higher one
counts. Where several lines are needed their number stands behind the signs.

{tables}
"""

FAILURE_HEADER = ("signature", "cause", "recognised by", "role", "action", "weight", "fix", "source")


def failures_page() -> str:
    """docs/reference/failures.md."""
    systems = list(dict.fromkeys(signature.systems[0] for signature in SIGNATURES))
    tables = [_failures_of(system) for system in sorted(systems, key=lambda system: (system != "any", system))]
    return FAILURES_PAGE.format(number=len(SIGNATURES), tables="\n\n".join(tables))


def _failures_of(system: str) -> str:
    entries = [signature for signature in SIGNATURES if signature.systems[0] == system]
    rows = [FAILURE_HEADER, ("---",) * len(FAILURE_HEADER), *(_failure_row(signature) for signature in entries)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"## {'Anywhere' if system == 'any' else system}\n\n{table}"


def _failure_row(signature: Signature) -> tuple[str, ...]:
    texts = [_code(text) for text in dict.fromkeys(sign.text.strip() for sign in signature.signs)]
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


PAGES = {"models.md": models_page, "reference/failures.md": failures_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
