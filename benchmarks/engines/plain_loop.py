"""Train one engine in a plain loop, in turns: `python -m engines.plain_loop NAME SETTING_JSON`."""

from __future__ import annotations

import importlib
import itertools
import json
import sys

from engines.gate import StepGate
from engines.setting import Setting
from engines.worker import make_batches


def main() -> None:
    setting = Setting(**json.loads(sys.argv[2]))
    step, _ = importlib.import_module(f"engines.{sys.argv[1]}").make(setting)
    batches = itertools.cycle(make_batches(setting))
    gate = StepGate()
    while gate.wait():
        step(*next(batches))


if __name__ == "__main__":
    main()
