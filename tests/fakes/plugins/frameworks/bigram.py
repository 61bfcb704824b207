"""Train without a tensor library, in all processes of a run: for tests of hosts, jobs and signals."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[3]


def check(experiment):
    """Accept every experiment."""


def train(experiment, attempt):
    """Train a table of bigrams."""
    sys.path.insert(0, str(TESTS))
    from fakes import bigram_engine

    bigram_engine.train_bigrams_on_hosts(experiment, attempt)
