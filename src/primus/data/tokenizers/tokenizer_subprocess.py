"""An engine in a process of its own: it loads while this process does something else, and takes no memory here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from primus.data.tokenizers.tokenizer import Batch, TokenizerEngine
from primus.errors import PrimusError

Result = TypeVar("Result")


def is_possible() -> bool:
    """Whether this system can copy a process, and this process may have others."""
    return "fork" in multiprocessing.get_all_start_methods() and not multiprocessing.current_process().daemon


class TokenizerSubprocess(Generic[Result]):
    """An engine that a process of its own has loaded, for this process and for those that are forked from it.

    That process only loads: each process that asks has a copy of it to itself, which shares its memory and answers one
    request at a time. All of them end when nobody is left who could ask. It can be pickled: the other process loads an
    engine of its own.
    """

    def __init__(self, engine: TokenizerEngine, load: Callable[[], Result]) -> None:
        """Start the process, and do not wait for it.

        Args:
            engine: What answers there.
            load: What is called there first, and makes `engine` ready.
        """
        self._engine = engine
        self._door, theirs = socket.socketpair()
        self._channels: dict[int, Connection] = {}
        context = multiprocessing.get_context("fork")
        context.Process(target=_serve_engine, args=(engine, load, theirs, self._door), daemon=True).start()
        theirs.close()
        weakref.finalize(self, self._door.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return _return_engine, (self._engine,)

    def wait_until_loaded(self) -> Result:
        """What `load` returned, as soon as it has.

        Raises:
            PrimusError: The process was killed.
            Exception: What `load` raised.
        """
        result: Result = self._send_request("loaded", ())
        return result

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> Batch:
        """Token ids of each text."""
        batch: Batch = self._send_request("encode_batch", (list(texts), add_special_tokens))
        return batch

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        text: str = self._send_request("decode", (list(ids),))
        return text

    def _send_request(self, name: str, arguments: tuple[Any, ...]) -> Any:
        try:
            channel = self._open_channel()
            channel.send((name, arguments))
            succeeded, value = channel.recv()
        except (EOFError, OSError):
            raise PrimusError(
                "the process of the tokenizer's library was killed, perhaps for lack of memory",
                "run the same command again, with fewer --workers if memory is short; finished shards are kept",
            ) from None
        if not succeeded:
            raise value
        return value

    def _open_channel(self) -> Connection:
        """This process's own way to its copy, which a process that is forked later must not use."""
        own = self._channels.get(os.getpid())
        if own is None:
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._door, [b"."], [theirs.fileno()])
            own = self._channels[os.getpid()] = Connection(ours.detach())
        return own


def _return_engine(engine: TokenizerEngine) -> TokenizerEngine:
    return engine


def _serve_engine(
    engine: TokenizerEngine, load: Callable[[], Any], door: socket.socket, other_end: socket.socket
) -> None:
    """Load, then make a copy for each that comes through the door, until there can be nobody any more."""
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks decides when it is over
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    loaded = _capture_outcome(load)
    while True:
        _, descriptors, *_ = socket.recv_fds(door, 1, 1)
        if not descriptors:
            os._exit(0)
        if os.fork() == 0:
            door.close()
            _answer_requests(engine, loaded, Connection(descriptors[0]))
            os._exit(0)
        os.close(descriptors[0])


def _answer_requests(engine: TokenizerEngine, loaded: tuple[bool, Any], channel: Connection) -> None:
    """Answer the requests of one process until it is gone."""
    try:
        while True:
            name, arguments = channel.recv()
            channel.send(loaded if name == "loaded" else _capture_outcome(getattr(engine, name), *arguments))
    except (EOFError, OSError):
        return


def _capture_outcome(act: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Whether something went well, and what it returned or raised."""
    try:
        return True, act(*arguments)
    except Exception as error:  # noqa: BLE001 - who asked raises it
        return False, error
