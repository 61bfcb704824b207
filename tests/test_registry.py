"""Plug-ins are found by name: the user's files first, then the package's, then entry points."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus import registry
from primus.callback import CALLBACKS
from primus.contract import PlugInKind, complete_module, list_members
from primus.data.source import SOURCES
from primus.errors import PrimusError, UsageError
from primus.framework import EXPORTS, FRAMEWORKS, IMPORTS, LOGS, TRANSLATIONS, VARIABLES
from primus.patch import PATCHES
from primus.runtime import JOB_RUNTIMES, NODE_RUNTIMES, RUNTIMES
from primus.task import TASKS

KINDS = (TASKS, RUNTIMES, FRAMEWORKS, CALLBACKS, PATCHES, SOURCES, TRANSLATIONS, IMPORTS, EXPORTS, LOGS, VARIABLES)

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a file of the user's plug-in folder."""
    monkeypatch.setenv("PRIMUS_PLUGINS", str(tmp_path))

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        registry._index_folders.cache_clear()
        return path

    return write


@pytest.mark.parametrize("name", ["llama3.1_8B", "LLAMA3.1-8b", "llama3.1_8b.yaml", "Llama3.1_8B.YAML"])
def test_names_ignore_case_dashes_and_the_suffix(name: str) -> None:
    assert registry.find_plug_in_file("models", name) == registry.PACKAGE / "presets/models/llama3.1_8B.yaml"


@pytest.mark.parametrize("name", ["runs list", "Runs_List".replace("_", " "), "RUNS LIST"])
def test_a_task_in_a_folder_is_two_words(name: str) -> None:
    assert registry.find_plug_in_file("tasks", name) == registry.PACKAGE / "tasks/runs/list.py"


def test_private_files_are_not_plug_ins() -> None:
    assert not [
        name for kind in registry.FOLDERS for name in registry.list_plug_ins(kind) if name.startswith(("_", "-", "."))
    ]
    with pytest.raises(UsageError):
        registry.find_plug_in_file("tasks", "train _job")


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("runtimes", "dirct", "no runtime 'dirct'\n  did you mean 'direct'?"),
        ("tasks", "runs lst", "no task 'runs lst'\n  did you mean 'runs list'?"),
        ("models", "llama3.1-8", "no model 'llama3.1-8'\n  did you mean 'llama3.1_8B'?"),
        ("trainers", "zebra", "no trainer 'zebra'\n  valid: maxtext_pre_trainer, megatron_bridge_pretrain_trainer, "),
        ("profiles", "mi535x", "no profile 'mi535x'\n  did you mean 'mi355x'?"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(kind: str, name: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        registry.find_plug_in_file(kind, name)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.name))
def test_every_plug_in_of_the_package_implements_its_contract(kind: PlugInKind[Any]) -> None:
    for name in registry.list_plug_ins(kind.name):
        module = registry.load_plug_in(kind, name)
        assert all(hasattr(module, member.name) for member in list_members(kind.contract)), name
        assert registry.read_summary(kind.name, name).endswith("."), name


def test_a_file_of_the_user_replaces_one_of_the_package(write: Write) -> None:
    file = write("frameworks/native.py", '"""Mine."""\ncheck = train = print\n')
    assert registry.find_plug_in_file("frameworks", "native") == file
    assert registry.load_plug_in(FRAMEWORKS, "native").train is print
    assert registry.read_summary("frameworks", "native") == "Mine."
    assert registry.list_plug_ins("frameworks").count("native") == 1


def test_several_folders_are_searched_in_order(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write("a/frameworks/one.py", '"""First."""\n')
    write("b/frameworks/one.py", '"""Second."""\n')
    second = write("b/frameworks/two.py", '"""Two."""\n')
    monkeypatch.setenv("PRIMUS_PLUGINS", f"{tmp_path / 'a'}::{tmp_path / 'none'}:{tmp_path / 'b'}")
    assert registry.find_plug_in_file("frameworks", "one") == first
    assert registry.find_plug_in_file("frameworks", "two") == second


def test_a_plug_in_may_be_a_package_and_import_its_parts(write: Write) -> None:
    write("frameworks/mine/__init__.py", '"""Mine."""\nfrom .part import check, train\n')
    write("frameworks/mine/part.py", "check = train = print\n")
    assert registry.load_plug_in(FRAMEWORKS, "mine").check is print


def test_functions_may_name_their_arguments_freely_and_take_more_with_defaults(write: Write) -> None:
    write("frameworks/mine.py", "def check(e): ...\ndef train(e, *rest, verbose=False): ...\n")
    assert registry.load_plug_in(FRAMEWORKS, "mine").USES_TORCH is False


def test_a_task_of_a_folder_may_be_a_package(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write("tasks/my_group/my_pack/__init__.py", '"""Mine."""\nfrom msgspec import Struct as Options\nrun = print\n')
    assert "my-group my-pack" in registry.list_plug_ins("tasks")
    registry.load_plug_in(TASKS, "my-group my-pack").run("called", "here")  # type: ignore[arg-type]
    assert capsys.readouterr().out == "called here\n"


def test_an_error_is_placed_in_the_innermost_file_of_the_user(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = write("lib/my_parts.py", "def check(e):\n    return {}['lr']\n")
    monkeypatch.syspath_prepend(helper.parent)
    write("frameworks/mine.py", "import my_parts\ndef check(e): return my_parts.check(e)\ntrain = print\n")
    with pytest.raises(KeyError) as caught:
        registry.load_plug_in(FRAMEWORKS, "mine").check(None)  # type: ignore[arg-type]
    assert registry.find_failing_plug_in(caught.value) == (f"{helper}:2", True)


def test_an_error_of_this_package_alone_blames_no_plug_in() -> None:
    with pytest.raises(UsageError) as caught:
        registry.find_plug_in_file("tasks", "nothing")
    assert registry.find_failing_plug_in(caught.value) is None


def test_only_tasks_may_lie_in_the_folder_of_subcommands(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PACKAGE", write(f"{registry.SUBCOMMANDS}/greet.py", "").parents[2])
    registry._index_folders.cache_clear()
    found = {kind: registry.has_plug_in(kind, "greet") for kind in ("tasks", "runtimes", "hooks")}
    registry._index_folders.cache_clear()
    assert found == {"tasks": True, "runtimes": False, "hooks": False}


def test_a_plug_in_is_imported_once(write: Write) -> None:
    write("frameworks/once.py", "check = train = print\n")
    assert registry.load_plug_in(FRAMEWORKS, "once") is registry.load_plug_in(FRAMEWORKS, "ONCE")


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("def work(:\n", "framework 'bad' cannot be loaded: ", ""),
        (
            "\nimport no_such_module\n",
            "frameworks/bad.py:2: ModuleNotFoundError: No module named 'no_such_module'",
            "",
        ),
        (
            "\nimport primus.model_layers\n",
            "frameworks/bad.py:2: ModuleNotFoundError: No module named 'primus.model_layers'",
            "import primus.models.layers, where its contents are now",
        ),
        (
            "from primus.launch.plan import JobState\n",
            "frameworks/bad.py:1: ModuleNotFoundError: No module named 'primus.launch.plan'",
            "import primus.plan (RemoteLaunch, JobState and Submission: primus.runtime), where its contents are now",
        ),
        ("x = 1\nx / 0\n", "frameworks/bad.py:2: ZeroDivisionError: ", ""),
        (
            "check = print\n",
            "frameworks/bad.py: framework 'bad' has no train",
            "define train(experiment: Experiment, attempt: Attempt) -> None (see docs/plug-ins.md)",
        ),
        (
            "x = 1\n",
            "frameworks/bad.py: framework 'bad' has no check and no train",
            "define check(experiment: Experiment) -> None; train(experiment: Experiment, attempt: Attempt) -> None",
        ),
        (
            "check = print\ndef train(experiment): ...\n",
            "frameworks/bad.py:2: framework 'bad': train(experiment): too many positional arguments",
            "define train(experiment: Experiment, attempt: Attempt) -> None",
        ),
        (
            "check = train = 3\n",
            "frameworks/bad.py: framework 'bad': check is not a function",
            "define check(experiment",
        ),
        ("raise SystemExit(3)\n", "frameworks/bad.py:1: SystemExit: 3", ""),
    ],
)
def test_a_broken_plug_in_is_named_with_file_and_line(write: Write, text: str, problem: str, hint: str) -> None:
    write("frameworks/bad.py", text)
    with pytest.raises(PrimusError) as caught:
        registry.load_plug_in(FRAMEWORKS, "bad")
    assert problem in caught.value.problem
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "text", "problem", "signature"),
    [
        (SOURCES, "x = 1\n", "source 'bad' has neither documents nor DATASET", "documents() -> Iterator[str]"),
        (
            SOURCES,
            "def documents(name): ...\n",
            "source 'bad': documents(name): missing a required argument: 'name'",
            "documents() -> Iterator[str]",
        ),
        (
            TASKS,
            "from msgspec import Struct as Options\ndef prepare(options, context): ...\n",
            "task 'bad' has no work",
            "work(attempt: Attempt) -> None",
        ),
        (
            RUNTIMES,
            "from msgspec import Struct as Options\nLEVEL = 'node'\nwrap = print\nCOMMANDS = ('list',)\n",
            "runtime 'bad' has no run",
            "run(options: Any, context: TaskContext) -> int | None",
        ),
        (
            RUNTIMES,
            "from msgspec import Struct as Options\nLEVEL = 'node'\nwrap = print\ndef start(remote): ...\n",
            "runtime 'bad': start(remote): too many positional arguments",
            "start(remote: RemoteLaunch, run: Run | None, say: Say) -> int",
        ),
        (
            JOB_RUNTIMES,
            "def find_states(submissions): ...\n",
            "runtime 'bad' has no cancel",
            "cancel(submission: Submission) -> None",
        ),
        (
            TASKS,
            "Options = {}\nrun = print\n",
            "task 'bad': Options is dict, not type[Struct]",
            "define Options: type[Struct]",
        ),
        (
            FRAMEWORKS,
            "check = train = print\nKEYS = 'stride'\n",
            "framework 'bad': KEYS is str, not Collection[str]",
            "define KEYS: Collection[str]",
        ),
        (
            SOURCES,
            "DATASET = 'owner/name'\n",
            "source 'bad': DATASET is str, not HubDataset | None",
            "define DATASET: HubDataset",
        ),
        (PATCHES, "PATCH = 1\napply = print\n", "patch 'bad': PATCH is int, not Patch", "PATCH: Patch"),
        (PATCHES, "def apply(): ...\n", "patch 'bad' has no PATCH", "PATCH: Patch"),
        (
            TASKS,
            "from msgspec import Struct as Options\ndef doc(): ...\ndef run(a, b): ...\ndef chose_options(a, b): ...\n",
            "bad.py:4: task 'bad': chose_options is never used",
            "did you mean 'choose_options'? If not, begin the name with an underscore",
        ),
        (
            TASKS,
            "from msgspec import Struct as Options\nOVERRIDE = True\ndef run(a, b): ...\n",
            "task 'bad': OVERRIDE is never used",
            "did you mean 'OVERRIDES'?",
        ),
        (VARIABLES, "LIBRARIES = ()\n", "variable 'bad' has no list_settings", "list_settings(workload: JobWorkload"),
    ],
)
def test_a_member_that_breaks_the_contract_is_named_with_its_signature(
    write: Write, kind: PlugInKind[Any], text: str, problem: str, signature: str
) -> None:
    file = write(f"{kind.name}/bad.py", text)
    with pytest.raises(PrimusError) as caught:
        registry.load_plug_in(kind, "bad")
    assert caught.value.problem.startswith(str(file))
    assert problem in caught.value.problem
    assert signature in caught.value.hint


OPTIONS = "from msgspec import Struct as Options\n"
PLAN = "from primus.plan import LaunchPlan\nLEVEL = 'container'\n" + OPTIONS


@pytest.mark.parametrize(
    ("kind", "text", "call", "problem"),
    [
        (TASKS, OPTIONS + "def run(o, c): return 'ok'\n", "run", "run returned str, not int | None"),
        (TASKS, OPTIONS + "def run(o, c): return True\n", "run", "run returned bool, not int | None"),
        (TASKS, OPTIONS + "async def run(o, c): ...\n", "run", "run returned coroutine, not int | None"),
        (RUNTIMES, PLAN + "def wrap(p, o, c): ...\n", "wrap", "wrap returned None, not LaunchPlan"),
        (
            RUNTIMES,
            PLAN + "def wrap(p, o, c): return LaunchPlan\n",
            "wrap",
            "wrap returned the class LaunchPlan, not LaunchP",
        ),
        (
            RUNTIMES,
            PLAN + "wrap = print\ndef split_words(w): return ''\n",
            "split_words",
            "returned str, not tuple[tuple[",
        ),
        (SOURCES, "def documents(): return 'text'\n", "documents", "documents returned str, not Iterator[str]"),
    ],
)
def test_a_wrong_result_is_named_with_file_function_and_type(
    write: Write, kind: PlugInKind[Any], text: str, call: str, problem: str
) -> None:
    file = write(f"{kind.name}/bad.py", text)
    num_arguments = {"wrap": 3, "run": 2, "split_words": 1}.get(call, 0)
    with pytest.raises(PrimusError) as caught:
        list(getattr(registry.load_plug_in(kind, "bad"), call)(*num_arguments * [("a", "b")]))
    assert caught.value.problem.startswith(str(file))
    assert problem in caught.value.problem
    assert "docs/plug-ins.md" in caught.value.hint


def test_a_list_is_taken_where_the_contract_has_a_tuple(write: Write) -> None:
    write("runtimes/lists.py", PLAN + "wrap = print\ndef split_words(words): return [list(words), []]\n")
    split: Any = registry.load_plug_in(RUNTIMES, "lists").split_words(("a",))
    assert split == [["a"], []]


def test_names_ignore_case_and_underscores(write: Write) -> None:
    write("frameworks/My_Engine.py", "check = train = print\n")
    assert "my-engine" in registry.list_plug_ins("frameworks")
    assert all(registry.has_plug_in("frameworks", name) for name in ("my_engine", "My-Engine"))
    assert not registry.has_plug_in("frameworks", "engine")


def test_the_parts_of_a_framework_share_modules_and_need_no_package(write: Write) -> None:
    write("frameworks/mini/names.py", "LIBRARIES = ()\n")
    write("frameworks/mini/variables.py", "from .names import LIBRARIES\ndef list_settings(w, d): return {}\n")
    assert registry.load_plug_in(VARIABLES, "mini").LIBRARIES == ()
    assert not registry.has_plug_in("frameworks", "mini")
    assert not registry.has_plug_in("logs", "mini")


def test_a_user_may_write_a_part_of_a_framework_of_the_package(write: Write) -> None:
    file = write("frameworks/nemo/logs.py", "READER = int\n")
    assert registry.find_plug_in_file("logs", "nemo") == file
    assert registry.list_plug_ins("logs").count("nemo") == 1


def test_patches_of_frameworks_are_found_beside_the_others(write: Write) -> None:
    write("frameworks/mini/patches/own_fix.py", "")
    assert {"megatron-core-cpu", "torch-cpu-norm", "own-fix"} <= set(registry.list_plug_ins("patches"))


def test_one_file_may_train_and_have_variables(write: Write) -> None:
    write(
        "frameworks/both.py",
        "LIBRARIES = ()\ndef list_settings(w, d): return {}\ndef train(e, a): ...\ncheck = print\n",
    )
    assert registry.load_plug_in(FRAMEWORKS, "both").STAGES == ("pre_trainer",)
    assert registry.load_plug_in(VARIABLES, "both").LIBRARIES == ()


def test_folders_of_older_versions_are_read_and_named_once(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    older = write("backends/older.py", "check = train = print\n")
    write("frameworks/settings_only.py", "LIBRARIES = ()\ndef list_settings(w, d): return {}\n")
    assert registry.load_plug_in(FRAMEWORKS, "older") is registry.load_plug_in(FRAMEWORKS, "Older")
    assert registry.load_plug_in(VARIABLES, "settings-only").LIBRARIES == ()
    assert not registry.has_plug_in("frameworks", "settings-only")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"primus-cli: {older}: the place of this plug-in is the folder frameworks/ now"
    assert len(said) == 2


def test_members_that_a_file_leaves_out_get_the_defaults_of_the_contract(write: Write) -> None:
    write("runtimes/box.py", "from msgspec import Struct as Options\nLEVEL = 'container'\nwrap = print\n")
    runtime = registry.load_plug_in(RUNTIMES, "box")
    assert (runtime.parse, runtime.start, runtime.COMMANDS, runtime.SPELLINGS) == (None, None, (), None)
    assert runtime.split_words(("a", "b")) == (("a", "b"), ())
    assert runtime.accepts_option((), "--name")
    write("frameworks/mine.py", "check = train = print\nKEYS = {'a'}\n")
    backend = registry.load_plug_in(FRAMEWORKS, "mine")
    assert ({"a"}, False) == (backend.KEYS, backend.USES_TORCH)
    write("sources/wiki.py", "def documents():\n    yield 'text'\n")
    assert registry.load_plug_in(SOURCES, "wiki").version() == ""


def test_a_folder_may_check_in_support_and_train_in_a_module_that_only_workers_import(write: Write) -> None:
    write("frameworks/split/__init__.py", "USES_TORCH = True\n")
    with pytest.raises(PrimusError, match="has no check and no train"):
        registry.load_plug_in(FRAMEWORKS, "split")
    write("frameworks/split/support.py", "def check(experiment):\n    return experiment\n")
    write("frameworks/split/engine/run.py", "import absent_library\n")
    framework: Any = registry.load_plug_in(FRAMEWORKS, "split")
    assert framework.check("experiment") == "experiment"
    with pytest.raises(ImportError, match="absent_library"):
        framework.train("experiment", "attempt")


def test_a_file_that_is_not_text_is_listed_and_refused_when_loaded(write: Write) -> None:
    file = write("frameworks/odd.py", "")
    file.write_bytes(b"\xff\xfe")
    assert registry.read_summary("frameworks", "odd") == ""
    with pytest.raises(PrimusError, match=r"odd\.py"):
        registry.load_plug_in(FRAMEWORKS, "odd")


def test_an_entry_point_may_name_an_object_and_one_that_cannot_be_completed_is_refused() -> None:
    plug_in: Any = SimpleNamespace(check=print, train=print)
    complete_module(FRAMEWORKS, plug_in, "framework 'x'", "package:x", is_built_in=False)
    assert (plug_in.KEYS, plug_in.USES_TORCH) == ((), False)

    class Slotted:
        __slots__ = ()
        check = train = staticmethod(print)

    slotted: Any = Slotted()
    with pytest.raises(PrimusError) as caught:
        complete_module(FRAMEWORKS, slotted, "framework 'x'", "package:x", is_built_in=False)
    assert caught.value.problem.startswith("package:x: framework 'x': ")


@pytest.mark.parametrize(
    "kind",
    [*KINDS, JOB_RUNTIMES, NODE_RUNTIMES],
    ids=lambda kind: kind.contract.__name__,
)
def test_every_contract_can_be_compared_at_run_time(kind: PlugInKind[Any]) -> None:
    members = list_members(kind.contract)
    assert members
    for member in members:
        assert member.documentation
        assert member.format_signature().startswith(member.name)
        assert member.read_signature() is not None or member.function.__annotations__["return"]
