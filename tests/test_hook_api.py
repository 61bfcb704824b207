"""What authors of Python hooks import: the context, what they return, and the runner of a file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from primus import hook as api
from primus.hook import HookContext, HookReply, Settings, Stop, hook

TOLD = {
    "PRIMUS_TASK": "train pretrain",
    "PRIMUS_HOOK_STAGE": "after",
    "PRIMUS_NODE_RANK": "1",
    "PRIMUS_NNODES": "2",
    "PRIMUS_NPROC": "8",
}


def ran(tmp_path: Path, body: str, functions: str = "f", *words: str) -> tuple[int, HookReply]:
    file = tmp_path / "1_a.py"
    file.write_text(f"from primus.hook import Settings, Stop, hook\n{body}")
    result = tmp_path / "result.json"
    code = api.main([str(file), functions, *words], {**TOLD, "PRIMUS_HOOK_RESULT": str(result)})
    return code, msgspec.json.decode(result.read_bytes(), type=HookReply)


def test_the_context_has_the_values_of_the_launcher_variables() -> None:
    more = {"PRIMUS_RUN_DIR": "/run", "PRIMUS_CONFIG": "", "PRIMUS_OUTCOME": "failed", "PRIMUS_EXIT_CODE": "137"}
    context = api.build_hook_context(TOLD | more, ["--lr", "1"])
    assert context == HookContext(
        stage="after",
        task="train pretrain",
        words=("--lr", "1"),
        node_rank=1,
        nnodes=2,
        nproc=8,
        environ=TOLD | more,
        run_directory=Path("/run"),
        outcome="failed",
        exit_code=137,
    )


def test_the_decorator_returns_the_function() -> None:
    def f(context: HookContext) -> Settings:
        return Settings(env={"A": context.nproc})

    assert hook(f) is f
    assert hook(stage="before", once=True, lock=True, timeout_s=1.5)(f) is f


def test_functions_run_in_order_and_later_settings_override_earlier_ones(tmp_path: Path) -> None:
    body = (
        "def f(context): return Settings(env={'A': 1, 'B': 'x'}, extra={'lr': 1e-4})\n"
        "def g(context): return Settings(env={'A': context.words[0]}, extra={'flag': False})\n"
        "def h(context): return None\n"
        "if __name__ == '__main__': raise SystemExit(9)\n"
    )
    code, reply = ran(tmp_path, body, "f,g,h", "word")
    assert code == 0
    assert reply == HookReply(env={"A": "word", "B": "x"}, extra={"lr": "0.0001", "flag": "false"})


def test_stop_skips_the_remaining_functions(tmp_path: Path) -> None:
    body = "def f(context): raise Stop('no', 'do this')\ndef g(context): return 1 / 0\n"
    assert ran(tmp_path, body, "f,g") == (1, HookReply(stop="no", hint="do this"))


def test_a_result_other_than_settings_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"1_a\.py: f returned dict, not primus\.hook\.Settings or None; define f\("):
        ran(tmp_path, "def f(context): return {'A': 1}\n")


def test_stop_has_a_reason_and_a_hint() -> None:
    stop = Stop("why", "then")
    assert (str(stop), stop.reason, stop.hint) == ("why", "why", "then")
