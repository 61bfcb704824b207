"""Nodes that are started one by one agree on one run before any worker starts."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from fakes import cli
from primus.errors import PrimusError, UsageError
from primus.launch.nodes import rendezvous
from primus.launch.nodes.rendezvous import JoinReply

REPLY = JoinReply("20260101_000000-abcd", 0)


def head(port: int) -> rendezvous.HeadAddress:
    return rendezvous.HeadAddress("localhost", port)


def in_thread(call: Callable[[], object]) -> Callable[[], object]:
    """Start `call`; gives what it returned or raised."""
    result: list[object] = []

    def work() -> None:
        try:
            result.append(call())
        except PrimusError as error:
            result.append(error)

    thread = threading.Thread(target=work)
    thread.start()

    def outcome() -> object:
        thread.join(timeout=20)
        assert not thread.is_alive()
        return result[0]

    return outcome


def test_every_node_gets_the_run_of_node_0(port: int) -> None:
    nodes = [in_thread(lambda rank=rank: rendezvous.join_rendezvous(head(port), rank, "same", 10)) for rank in (1, 2)]
    rendezvous.lead_rendezvous(port, 3, REPLY, "same", 10)
    assert [node() for node in nodes] == [REPLY, REPLY]


def test_node_0_gives_the_nodes_their_ranks_by_where_they_stand(port: int) -> None:
    kept: dict[int, rendezvous.RendezvousPeer] = {}
    seen: dict[int, tuple[str, ...]] = {}

    def swap(peers: Mapping[int, rendezvous.RendezvousPeer]) -> dict[int, int]:
        seen.update({rank: peer.place for rank, peer in peers.items()})
        return {1: 2, 2: 1}

    nodes = [
        in_thread(lambda rank=rank: rendezvous.join_rendezvous(head(port), rank, "same", 10, place=(f"leaf{rank}",)))
        for rank in (1, 2, 3)
    ]
    rendezvous.lead_rendezvous(port, 4, REPLY, "same", 10, kept, swap)
    replies = [node() for node in nodes]
    assert [reply.node_rank for reply in replies if isinstance(reply, JoinReply)] == [2, 1, None]
    assert seen == {1: ("leaf1",), 2: ("leaf2",), 3: ("leaf3",)}
    assert {rank: peer.place for rank, peer in kept.items()} == {1: ("leaf2",), 2: ("leaf1",), 3: ("leaf3",)}
    for peer in kept.values():
        peer.stream.close()


def test_nodes_learn_why_node_0_cannot_give_them_ranks(port: int) -> None:
    def fail(peers: Mapping[int, rendezvous.RendezvousPeer]) -> dict[int, int]:
        raise UsageError("topology.yaml names no node")

    node = in_thread(lambda: rendezvous.join_rendezvous(head(port), 1, "same", 10))
    with pytest.raises(UsageError, match="names no node"):
        rendezvous.lead_rendezvous(port, 2, REPLY, "same", 10, assign_ranks=fail)
    assert "names no node" in str(node())


def test_a_node_that_starts_first_waits_for_node_0(port: int) -> None:
    node = in_thread(lambda: rendezvous.join_rendezvous(head(port), 1, "same", 10))
    with pytest.raises(PrimusError, match=f"node 0 at localhost:{port} was not reached in 0.3 s"):
        rendezvous.join_rendezvous(head(port), 1, "same", 0.3)
    rendezvous.lead_rendezvous(port, 2, REPLY, "same", 10)
    assert node() == REPLY


def test_a_different_configuration_fails_on_both_nodes(port: int) -> None:
    node = in_thread(lambda: rendezvous.join_rendezvous(head(port), 1, "other", 10))
    with pytest.raises(UsageError, match="node 1 was started with another configuration than node 0"):
        rendezvous.lead_rendezvous(port, 2, REPLY, "same", 10)
    refusal = node()
    assert isinstance(refusal, UsageError)
    assert "node 0 refuses node 1: its configuration differs from that of node 0" in refusal.problem


def test_a_missing_node_is_named_on_every_node_and_nothing_starts(port: int) -> None:
    node = in_thread(lambda: rendezvous.join_rendezvous(head(port), 2, "same", 10))
    with pytest.raises(PrimusError, match="node 1, 3 of 4 did not join within 1 s") as caught:
        rendezvous.lead_rendezvous(port, 4, REPLY, "same", 1)
    assert f"port {port}" in caught.value.hint
    assert "node 0 refuses node 2: node 1, 3 of 4 did not join within 1 s" in str(node())


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b'{"node_rank": "x"}\n', b"\x00\xff\n"])
def test_another_program_that_connects_is_ignored(port: int, said: bytes) -> None:
    leader = in_thread(lambda: rendezvous.lead_rendezvous(port, 2, REPLY, "same", 10))

    def greet() -> bool:
        try:
            with socket.create_connection(("localhost", port), timeout=2) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                stranger.recv(10)
                return True
        except OSError:
            return False

    cli.wait_for(greet, "node 0 listening")
    assert rendezvous.join_rendezvous(head(port), 1, "same", 10) == REPLY
    assert leader() is None


@pytest.mark.parametrize("rank", [0, 2, 7, -1])
def test_a_node_whose_rank_does_not_exist_or_is_taken_is_refused(port: int, rank: int) -> None:
    leader = in_thread(lambda: rendezvous.lead_rendezvous(port, 3, REPLY, "same", 10))
    second = in_thread(lambda: rendezvous.join_rendezvous(head(port), 2, "same", 10))

    def refusal() -> str:
        with pytest.raises(UsageError) as caught:
            rendezvous.join_rendezvous(head(port), rank, "same", 10)
        return caught.value.problem

    time.sleep(0.5)  # for the real node 2; were it later, it would be the one refused
    assert refusal() == f"node 0 refuses node {rank}: the nodes are 1 to 2, each started once"
    assert rendezvous.join_rendezvous(head(port), 1, "same", 10) == REPLY
    assert (leader(), second()) == (None, REPLY)


def test_a_restarted_node_joins_again(port: int) -> None:
    leader = in_thread(lambda: rendezvous.lead_rendezvous(port, 3, REPLY, "same", 10))

    def come_and_go() -> bool:
        try:
            with socket.create_connection(("localhost", port), timeout=2) as killed:
                killed.sendall(b'{"node_rank": 1, "fingerprint": "same"}\n')
                return True
        except OSError:
            return False

    cli.wait_for(come_and_go, "node 0 listening")
    again = in_thread(lambda: rendezvous.join_rendezvous(head(port), 1, "same", 10))
    assert rendezvous.join_rendezvous(head(port), 2, "same", 10) == REPLY
    assert (leader(), again()) == (None, REPLY)


def test_a_port_in_use_is_reported_in_one_message(port: int, tmp_path: Path) -> None:
    with closing(socket.create_server(("", port))):
        with pytest.raises(PrimusError, match=f"port {port} cannot be used: Address already in use"):
            rendezvous.check_port_free(port)
        done = cli.run("direct", "--master-port", str(port), "--", "tiny", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        f"primus-cli: port {port} cannot be used: Address already in use\n"
        "  choose another --master-port, the same on every node\n"
    )
    assert not (tmp_path / "out").exists()


# -- two launchers on this machine --


def node_words(rank: int, port: int, *task: str) -> list[str]:
    nodes = ["--nproc", "1", "--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1"]
    return ["direct", *nodes, "--master-port", str(port), "--", "tiny", *task]


def both(
    folders: tuple[Path, Path], port: int, tasks: tuple[list[str], list[str]], before: str = ""
) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of node 0 and node 1; that they meet on the loopback interface is no error here."""
    with ExitStack() as stack:
        commands = [
            cli.started(*node_words(rank, port, *tasks[rank]), cwd=folders[rank], before=before) for rank in (0, 1)
        ]
        nodes = [stack.enter_context(command) for command in commands]
        outputs = [node.communicate(timeout=60) for node in nodes]
    warning = re.compile(r"primus-cli: warning: the route to the master uses lo.*\n")
    errors = [warning.sub("", complaint) for _, complaint in outputs]
    return [(node.returncode, out, text) for node, (out, _), text in zip(nodes, outputs, errors, strict=True)]


def only_run(folder: Path) -> Path:
    (run,) = [entry for entry in (folder / "out/tiny").iterdir() if not entry.is_symlink()]
    return run


def test_two_nodes_with_a_workspace_each_write_the_same_run(tmp_path: Path, port: int) -> None:
    pytest.importorskip("torch")
    folders = (tmp_path / "a", tmp_path / "b")
    for folder in folders:
        folder.mkdir()
    results = both(folders, port, ([], []))
    assert [(code, errors) for code, _, errors in results] == [(0, ""), (0, "")]
    runs = [only_run(folder) for folder in folders]
    assert runs[0].name == runs[1].name
    assert "rank 0 of 2" in (runs[0] / "logs/rank_0.log").read_text()
    assert "rank 1 of 2" in (runs[1] / "logs/rank_1.log").read_text()
    outcome = json.loads((runs[0] / "metadata.json").read_text())["outcome"]
    assert outcome["state"] == "done"
    assert (runs[1] / "env/node_1/system_info.json").exists()
    assert (runs[1] / "logs/launch.node_1.log").exists()
    state = json.loads((runs[1] / "metadata.json").read_text())["outcome"]["state"]
    assert state == "done", "each folder has the outcome"


def test_a_failing_node_is_named_by_its_global_rank_on_every_node(tmp_path: Path, port: int) -> None:
    pytest.importorskip("torch")
    task = ["kill", "--rank", "1"]
    before = "from primus.launch.supervision import attempt_monitor; attempt_monitor.FAILED_PEERS_S = 0.5"
    for code, _, errors in both((tmp_path, tmp_path), port, (task, task), before):
        assert code == 137
        assert errors.startswith("primus-cli: run failed: rank 1 was killed by SIGKILL\n")
    outcome = json.loads((only_run(tmp_path) / "metadata.json").read_text())["outcome"]
    assert outcome["first_failure"]["rank"] == 1


def test_nodes_with_different_settings_start_nothing(tmp_path: Path, port: int) -> None:
    results = both((tmp_path, tmp_path), port, (["--setting", "a"], ["--setting", "b"]))
    assert [code for code, _, _ in results] == [2, 2]
    assert "node 1 was started with another configuration" in results[0][2]
    assert "node 0 refuses node 1" in results[1][2]
    outcome = json.loads((only_run(tmp_path) / "metadata.json").read_text())["outcome"]
    assert (outcome["state"], outcome["exit_code"]) == ("failed", 2)
