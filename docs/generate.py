"""Write the pages of docs/ that are made from the package itself: `python docs/generate.py`."""

from __future__ import annotations

from pathlib import Path

from primus import registry
from primus.config.load import load_model
from primus.config.schema import ModelSpec
from primus.model import ParameterCount, expert_ffn_size, flops_per_token, head_dim, num_query_groups, parameters

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

`framework: native` trains the dense models. Mixture-of-experts (MoE) and latent-attention (MLA) models load and count,
and native refuses them until they are built.

{table}

Heads are query heads / key-value heads x width; of latent attention, query heads x width. Context is the longest
sequence that the model was made for. Shapes follow the `config.json` of the model on the Hugging Face hub.
"""

SEQUENCE = 4096

HEADER = ("preset", "weights", "kind", "parameters", "active", "GFLOP", "layers", "hidden", "feed-forward", "heads",
          "vocabulary", "context")  # fmt: skip


def models_page() -> str:
    """docs/models.md."""
    specs = {name: load_model(name) for name in registry.names("models")}
    ordered = sorted(specs, key=lambda name: (name.partition("_")[0], parameters(specs[name]).total))
    rows = [HEADER, ("---",) * len(HEADER), *(_row(name, specs[name]) for name in ordered)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return MODELS_PAGE.format(sequence=SEQUENCE, table=table)


def _row(name: str, spec: ModelSpec) -> tuple[str, ...]:
    count = parameters(spec)
    tied = "" if spec.untie_embeddings_and_output_weights else ", tied"
    return (
        f"`{name}`",
        spec.hf_name or "-",
        _kind(spec) + tied,
        f"{count.total:,}",
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
    return " + ".join(parts) or "dense"


def _active(count: ParameterCount) -> str:
    return "-" if count.active == count.total else f"{count.active:,}"


def _feed_forward(spec: ModelSpec) -> str:
    if not spec.num_experts:
        return str(spec.ffn_hidden_size)
    shared = spec.moe_shared_expert_intermediate_size
    routed = f"{spec.moe_router_topk} of {spec.num_experts} x {expert_ffn_size(spec)}"
    return f"{routed} + {shared}" if shared else routed


def _heads(spec: ModelSpec) -> str:
    groups = "" if spec.multi_latent_attention else f" / {num_query_groups(spec)}"
    return f"{spec.num_attention_heads}{groups} x {head_dim(spec)}"


PAGES = {"models.md": models_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
