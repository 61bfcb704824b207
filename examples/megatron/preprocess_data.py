#!/usr/bin/env python3
"""Tokenize text into Megatron .bin/.idx files, with the options of Megatron-LM: `primus-cli direct -- data encode`.

    python3 examples/megatron/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --append-eod --workers 8
"""

import os
import sys
from pathlib import Path

PRIMUS = Path(__file__).resolve().parents[2] / "primus-cli"
os.execv(PRIMUS, [str(PRIMUS), "direct", "--", "data", "encode", *sys.argv[1:]])  # noqa: S606 - no shell is meant
