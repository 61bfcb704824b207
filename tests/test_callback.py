"""Callbacks are found by name, checked before anything starts, and called at their moments only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primus import registry
from primus.callback import CALLBACKS, MOMENTS, Callback, CallbackList
from primus.errors import PrimusError, UsageError
from primus.plug_in_choice import choose_plug_ins

COUNTER = '''"""Count steps."""

from msgspec import Struct

from primus.callback import Callback


class Options(Struct, kw_only=True):
    every: int = 1


class Counter(Callback):
    def __init__(self, options, training):
        self.every, self.count = options.every, 0

    def after_step(self):
        self.count += self.every

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def build(options, training):
    return Counter(options, training)
'''

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a callback of the user."""
    monkeypatch.setenv("PRIMUS_PLUGINS", str(tmp_path))

    def write(name: str, text: str) -> Path:
        path = tmp_path / "callbacks" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        registry._index_folders.cache_clear()
        return path

    return write


def built(*entries: Any) -> CallbackList:
    callbacks = CallbackList()
    for choice in choose_plug_ins(CALLBACKS, entries):
        callbacks.build(choice, None)  # type: ignore[arg-type]
    return callbacks


def test_names_and_options_are_read_in_order(write: Write) -> None:
    write("count_steps", COUNTER)
    choices = choose_plug_ins(CALLBACKS, [{"count-steps": {"every": 2}}, "early_stopping", {"garbage_collector": None}])
    assert [choice.name for choice in choices] == ["count_steps", "early_stopping", "garbage_collector"]
    assert choices[0].options.every == 2  # type: ignore[attr-defined]
    assert [choice.name for choice in choose_plug_ins(CALLBACKS, "early_stopping")] == ["early_stopping"]
    assert choose_plug_ins(CALLBACKS, None) == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("early_stoping", "no callback 'early_stoping'\n  did you mean 'early-stopping'?"),
        ({"early_stopping": {"patiense": 2}}, "callbacks: early_stopping: unknown option 'patiense'\n  did you mean"),
        ({"early_stopping": {"patience": 0}}, "callbacks: early_stopping: Expected int >= 1"),
        ({"early_stopping": {}, "garbage_collector": {}}, "callbacks: an entry has 2 names: early_stopping, garbage"),
        ({}, "callbacks: an entry has 0 names: none"),
    ],
)
def test_a_wrong_entry_is_a_usage_error_that_names_the_fix(entry: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_plug_ins(CALLBACKS, [entry])
    assert str(caught.value).startswith(message)


def test_a_callback_that_is_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="callbacks: early_stopping is there twice"):
        choose_plug_ins(CALLBACKS, ["early_stopping", {"early-stopping": {"patience": 9}}])


def test_a_callback_without_options_takes_none(write: Write) -> None:
    write("plain", "from primus.callback import Callback\ndef build(options, training): return Callback()\n")
    assert choose_plug_ins(CALLBACKS, ["plain"])
    with pytest.raises(UsageError, match="plain: unknown option 'x'\n  it takes no options"):
        choose_plug_ins(CALLBACKS, [{"plain": {"x": 1}}])


def test_a_file_without_build_is_refused_when_it_is_loaded(write: Write) -> None:
    file = write("empty", "")
    with pytest.raises(PrimusError, match="callback 'empty' has no build") as caught:
        choose_plug_ins(CALLBACKS, ["empty"])
    assert str(file) in caught.value.problem


def test_only_overridden_moments_are_called(write: Write) -> None:
    write("count_steps", COUNTER)
    callbacks = built("count_steps")
    assert [moment for moment in MOMENTS if callbacks._actions[moment]] == ["after_step"]
    for _ in range(3):
        callbacks.call("after_step")
    assert callbacks.collect_state() == {"count_steps": {"count": 3}}


def test_state_is_restored_by_name_and_other_states_are_ignored(write: Write) -> None:
    write("count_steps", COUNTER)
    callbacks = built("count_steps")
    callbacks.restore_state({"count_steps": {"count": 7}, "gone": {"x": 1}})
    callbacks.call("after_step")
    assert callbacks.collect_state() == {"count_steps": {"count": 8}}


def test_a_failure_names_callback_moment_file_and_line(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    text = COUNTER.replace("self.count += self.every", "self.count += self.evry")
    file = write("count_steps", text)
    line = text[: text.index("self.evry")].count("\n") + 1
    with pytest.raises(PrimusError) as caught:
        built("count_steps").call("after_step")
    problem = caught.value.problem
    assert problem.startswith(f"callback count_steps: after_step failed: {file}:{line}: AttributeError:")
    assert "Traceback" in capfd.readouterr().err


def test_a_state_that_json_cannot_hold_is_refused(write: Write) -> None:
    write("count_steps", COUNTER.replace('{"count": self.count}', '{"count": object()}'))
    with pytest.raises(PrimusError, match="callback count_steps: state_dict failed"):
        built("count_steps").collect_state()


def test_build_must_return_a_callback(write: Write) -> None:
    write("odd", "def build(options, training): return 1\n")
    with pytest.raises(PrimusError, match=r"callback 'odd': build returned int, not Callback"):
        built("odd")


@pytest.mark.parametrize(
    ("method", "problem", "hint"),
    [
        ("after_reports(self, report)", "Odd.after_reports is never called", "did you mean 'after_report'?"),
        ("on_step(self)", "Odd.on_step is never called", "after_step"),
        (
            "after_report(self)",
            "Odd.after_report(self): too many positional arguments",
            "report: StepReport)",
        ),
    ],
)
def test_a_method_that_no_moment_can_call_is_refused(write: Write, method: str, problem: str, hint: str) -> None:
    body = f"class Odd(Callback):\n    def {method}: ...\ndef build(options, training): return Odd()\n"
    write("odd", f"from primus.callback import Callback\n{body}")
    with pytest.raises(PrimusError) as caught:
        built("odd")
    assert caught.value.problem == f"callback odd: {problem}"
    assert hint in (caught.value.hint or "")


def test_callbacks_of_the_backend_raise_their_own_errors() -> None:
    class Failing(Callback):
        def after_step(self) -> None:
            raise KeyError("own")

    callbacks = CallbackList()
    callbacks.add(Failing())
    with pytest.raises(KeyError, match="own"):
        callbacks.call("after_step")
