"""Write what Hugging Face's configuration classes fill in for keys that a `config.json` leaves out.

    PRIMUS_ENGINES/huggingface/bin/python tools/hugging_face_defaults.py

Facts are the defaults of numbers, switches and texts of the classes of the installed transformers
(`transformers/models/*/configuration_*.py`), and their theta of rope.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TARGET = Path(__file__).parent.parent / "src/primus/config/imports/hugging_face_defaults.json"
FAMILIES = """
    deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 gemma gemma2 gemma3_text gemma4_text glm4_moe glm_moe_dsa gpt_oss
    lfm2 lfm2_moe llama llama4_text minimax_m2 ministral3 mistral mixtral olmo2 phi3 qwen2 qwen2_moe qwen2_vl_text
    qwen2_5_omni_text qwen2_5_vl_text qwen3 qwen3_moe qwen3_next qwen3_omni_moe_text qwen3_vl_text qwen3_vl_moe_text
    qwen3_5_text qwen3_5_moe_text seed_oss smollm3
""".split()
UNREAD = """
    output_router_logits pretraining_tp use_cache attention_dropout router_jitter_noise
""".split()
"""Keys that change nothing here."""


def list_defaults(model_type: str) -> dict[str, Any]:
    """Defaults of a family by key."""
    kind = CONFIG_MAPPING[model_type]
    base = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    found = {
        field.name: field.default
        for field in dataclasses.fields(kind)
        if isinstance(field.default, bool | int | float | str)
        and field.name not in (*base, *UNREAD)
        and not field.name.endswith("token_id")
    }
    theta = getattr(kind, "default_theta", 10000.0)
    theta = theta["global"] if isinstance(theta, dict) else theta
    return dict(sorted(({"rope_theta": theta} | found).items()))


def main() -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(list_defaults(name))}" for name in sorted(FAMILIES)]
    head = f'"transformers": {json.dumps(transformers.__version__)}'
    TARGET.write_text(f"{{\n{head},\n" + '"families": {\n' + ",\n".join(lines) + "\n}\n}\n")


if __name__ == "__main__":
    main()
