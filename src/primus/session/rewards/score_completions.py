"""The process that computes rewards: a request (JSON) a line on standard input, an answer a line on standard output.

A request is {"name", "prompt", "completion", "row"}, an answer {"value"} or {"problem"}.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

from primus import registry
from primus.errors import PrimusError, format_error_place
from primus.reward import REWARDS

LONGEST_PROBLEM = 150
"""Characters: an answer stays below 1 KiB in JSON, whatever they are."""


def main() -> None:
    """Answer requests until standard input ends."""
    # What a reward prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer_request(json.loads(line))), file=answers, flush=True)


def answer_request(request: Mapping[str, Any]) -> dict[str, float | str]:
    """The reward, or what is wrong with it."""
    try:
        reward = registry.load_plug_in(REWARDS, request["name"]).reward
        value = reward(request["prompt"], request["completion"], request["row"])
        is_finite = math.isfinite(value)
    except PrimusError as error:
        return {"problem": error.problem[:LONGEST_PROBLEM]}
    except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
        return {"problem": f"{format_error_place(error)}: {type(error).__name__}: {error}"[:LONGEST_PROBLEM]}
    if not is_finite:
        return {"problem": f"returned {value}"}
    return {"value": float(value)}


if __name__ == "__main__":
    main()
