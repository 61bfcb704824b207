from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from fakes import small_tokenizers as small
from primus.data.tokenizers.document_ends import END_OF_TEXT
from primus.data.tokenizers.huggingface import HuggingFaceEngine
from primus.data.tokenizers.load import parse_tokenizer
from primus.data.tokenizers.tokenizer import Batch, Tokenizer
from primus.data.tokenizers.tokenizer_subprocess import TokenizerSubprocess
from primus.errors import PrimusError, UsageError

TEXTS = [f"a{END_OF_TEXT}b", "", "Some text, and more\n", "cafe\u0301"]
WAIT_S = 20


class Own:
    """An engine that tells which process it is in."""

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> Batch:
        if texts == ["wrong"]:
            raise UsageError("a wrong text", "write another")
        return np.array([os.getpid()], np.uint32), np.array([1])

    def decode(self, ids: Sequence[int]) -> str:
        return f"{list(ids)}"


def process_of(engine: TokenizerSubprocess[int]) -> int:
    return int(engine.encode_batch(["a"], False)[0][0])


@pytest.fixture(scope="module")
def in_parallel() -> Tokenizer:
    return parse_tokenizer(small.by_pattern()["qwen2"].content, "parallel", END_OF_TEXT, in_parallel=True)


def test_a_tokenizer_is_the_same_whichever_process_has_its_library(in_parallel: Tokenizer) -> None:
    assert isinstance(in_parallel.exact, TokenizerSubprocess)
    alone = parse_tokenizer(in_parallel.content, "parallel", END_OF_TEXT)
    assert isinstance(alone.exact, HuggingFaceEngine)
    for field in ("vocab_size", "eod", "eod_id", "bos_id", "fingerprint", "special_strings", "cuttable"):
        assert getattr(in_parallel, field) == getattr(alone, field), field
    for engine in (in_parallel, in_parallel.exact):
        for found, expected in zip(
            engine.encode_batch(TEXTS, True), alone.exact.encode_batch(TEXTS, True), strict=True
        ):
            assert found.tolist() == expected.tolist()
    assert in_parallel.decode(in_parallel.encode("Some text")) == "Some text"


def test_where_there_is_no_fast_way_the_library_is_in_this_process() -> None:
    content = small.by_pattern()["gpt2"].content
    assert isinstance(parse_tokenizer(content, "slow", fast=False, in_parallel=True).exact, HuggingFaceEngine)
    lower = small.changed(small.by_pattern()["gpt2"], normalizer={"type": "Lowercase"}).content
    assert isinstance(parse_tokenizer(lower, "unknown", in_parallel=True).exact, HuggingFaceEngine)


def test_the_mistakes_of_a_file_are_told_as_they_are_otherwise() -> None:
    content = small.by_pattern()["gpt2"].content
    with pytest.raises(UsageError, match="no token 'no' in this tokenizer") as caught:
        parse_tokenizer(content, "gpt2", "no", in_parallel=True)
    assert caught.value.hint
    damaged = content.replace(b'"merges":', b'"merges": 7, "others":')
    for in_parallel in (False, True):
        with pytest.raises(UsageError, match=r"damaged: not a tokenizer\.json"):
            parse_tokenizer(damaged, "damaged", in_parallel=in_parallel)


def test_it_goes_to_another_process_as_the_engine_itself(in_parallel: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(in_parallel))
    assert isinstance(copy.exact, HuggingFaceEngine)
    assert copy.encode("some text") == in_parallel.encode("some text")


def in_a_fork(act: Callable[[], object]) -> object:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=lambda: theirs.send(act()))
    process.start()
    assert ours.poll(WAIT_S)
    result = ours.recv()
    process.join(WAIT_S)
    return result


def test_each_process_has_a_copy_to_itself() -> None:
    engine = TokenizerSubprocess(Own(), os.getpid)
    here = process_of(engine)
    forked = {in_a_fork(lambda: process_of(engine)) for _ in range(3)}
    assert process_of(engine) == here
    assert len({os.getpid(), engine.wait_until_loaded(), here, *forked}) == 6


def test_what_goes_wrong_there_is_raised_here_and_the_next_request_is_answered() -> None:
    engine = TokenizerSubprocess(Own(), lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        engine.wait_until_loaded()
    with pytest.raises(UsageError, match="a wrong text") as caught:
        engine.encode_batch(["wrong"], False)
    assert caught.value.hint == "write another"
    assert engine.decode([1, 2]) == "[1, 2]"


def test_a_killed_process_is_an_error_that_says_so() -> None:
    engine = TokenizerSubprocess(Own(), os.getpid)
    os.kill(process_of(engine), signal.SIGKILL)
    with pytest.raises(PrimusError, match="was killed"):
        engine.encode_batch(["a"], False)


def test_it_ends_with_the_last_that_could_ask() -> None:
    ended, held = os.pipe()  # its end comes when nobody holds the other end
    engine = TokenizerSubprocess(Own(), os.getpid)
    process_of(engine)
    os.close(held)
    assert not select.select([ended], [], [], 0)[0]
    del engine
    gc.collect()
    assert select.select([ended], [], [], WAIT_S)[0]
    assert os.read(ended, 1) == b""
    os.close(ended)


def test_it_ends_when_its_parent_is_killed() -> None:
    program = (
        "import os, time\n"
        "from test_subprocess import Own, TokenizerSubprocess, process_of\n"
        "print(process_of(engine := TokenizerSubprocess(Own(), os.getpid)), flush=True)\n"
        "time.sleep(60)\n"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout
        assert process.stdout.readline()
        process.kill()
        assert select.select([process.stdout], [], [], WAIT_S)[0]  # which all of them held
        assert process.stdout.read() == b""
