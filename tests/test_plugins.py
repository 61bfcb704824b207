"""One new file adds a plug-in of any kind, and it is used like the package's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes import cli
from primus import registry
from primus.cli.main import main
from primus.data.source import SOURCES
from primus.launch import prepare

TASK = '''"""Say hello."""

from msgspec import Struct

from primus.config.flags import Positional


class Options(Struct, kw_only=True):
    """Options of `hello`."""

    name: Positional
    """Whom to greet."""
    loud: bool = False
    """With an exclamation mark."""


def run(options, context):
    """Greet."""
    text = f"hello {options.name}" + "!" * options.loud
    context.result({"said": text}, text)
'''

RUNTIME = '''"""Run on the moon."""

from msgspec import Struct

from primus.plan import LaunchPlan

LEVEL = "container"


class Options(Struct, kw_only=True):
    """Run on the moon."""

    crater: str = "Tycho"
    """Where to land."""


def wrap(plan, options, context):
    """`plan`, on the moon."""
    return LaunchPlan(argv=("echo", "moon", options.crater, *plan.argv), inner=plan)
'''

BACKEND = '''"""Train by thinking."""


def check(experiment):
    """Anything goes."""


def train(experiment, attempt):
    """Think."""
    attempt.event("step", step=experiment.trainer.training.train_iters, loss=0.5)
'''

MODEL = "# My model\nextends: llama3.1_8B.yaml\nnum_layers: 3\n"
TRAINER = "# My settings\ntrain_iters: 7\nmock_data: true\nseq_length: 128\n"
EXPERIMENT = "modules:\n  pre_trainer: {framework: thinking, model: mine, config: quick}\n"


@pytest.fixture
def plug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Add a file to a plug-in folder that is in force."""
    folder = tmp_path / "plugins"
    monkeypatch.setenv("PRIMUS_PLUGINS", str(folder))
    monkeypatch.chdir(tmp_path)

    def plug(name: str, text: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        registry._index_folders.cache_clear()

    return plug


def test_a_task_is_one_file(plug: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    plug("tasks/hello.py", TASK)
    assert main(["direct", "--", "hello", "Ann", "--loud"]) == 0
    assert capsys.readouterr().out == "hello Ann!\n"
    assert main(["direct", "--", "hello", "Ann", "--json"]) == 0
    assert capsys.readouterr().out == '{\n  "said": "hello Ann"\n}\n'
    assert main(["--help"]) == 0
    assert ["hello", "Say", "hello."] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert main(["direct", "--", "hello", "--help"]) == 0
    assert "--loud  With an exclamation mark." in capsys.readouterr().out
    assert main(["direct", "--", "helo"]) == 2
    assert "did you mean 'hello'?" in capsys.readouterr().err


def test_a_task_in_a_folder_is_two_words(plug: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    plug("tasks/say/good_day.py", TASK)
    for typed in ("good-day", "good_day"):
        assert main(["direct", "--", "say", typed, "Ann"]) == 0
        assert capsys.readouterr().out == "hello Ann\n"


def test_a_runtime_is_one_file(plug: Callable[[str, str], None], capfd: pytest.CaptureFixture[str]) -> None:
    plug("runtimes/moon.py", RUNTIME)
    plug("tasks/hello.py", TASK)
    assert main(["moon", "--crater", "Kepler", "--", "hello", "Ann"]) == 0
    assert capfd.readouterr().out == f"moon Kepler {prepare.find_entry_point()} direct -- hello Ann\n"
    assert main(["moon", "--", "direct", "--env", "A=1", "--", "hello", "Ann"]) == 0
    assert capfd.readouterr().out == f"moon Tycho {prepare.find_entry_point()} direct --env A=1 -- hello Ann\n"
    assert main(["moon", "--help"]) == 0
    assert "--crater TEXT  Where to land. (default: Tycho)" in capfd.readouterr().out


def test_a_backend_a_model_and_a_trainer_preset_are_one_file_each(
    plug: Callable[[str, str], None], tmp_path: Path
) -> None:
    plug("frameworks/thinking.py", BACKEND)
    plug("models/mine.yaml", MODEL)
    plug("trainers/quick.yaml", TRAINER)
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    done = cli.run(
        "direct",
        "--",
        "train",
        "pretrain",
        "--config",
        "e.yaml",
        cwd=tmp_path,
        PRIMUS_PLUGINS=str(tmp_path / "plugins"),
    )
    assert done.returncode == 0, done.stderr
    assert '"step":7,"loss":0.5' in (tmp_path / "output/e/latest/events.jsonl").read_text()
    assert "num_layers: 3" in (tmp_path / "output/e/latest/config/model_config.yaml").read_text()


def test_a_key_of_a_backend_may_have_the_name_of_a_runtime_option(
    plug: Callable[[str, str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plug("frameworks/thinking.py", BACKEND + '\n\nKEYS = {"nnodes", "master_port"}\n')
    plug("models/mine.yaml", MODEL)
    plug("trainers/quick.yaml", TRAINER)
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    words = "direct -- config show --config e.yaml --master-port 3 --nnodes=2 --json"
    assert main(words.split()) == 0
    shown = json.loads(capsys.readouterr().out)["backend_args"]
    assert {key: item["value"] for key, item in shown.items()} == {
        "backend_args.master_port": 3,
        "backend_args.nnodes": 2,
    }


def test_a_source_is_found_and_loaded(plug: Callable[[str, str], None]) -> None:
    plug("sources/my_own.py", '"""My own."""\n\n\ndef documents():\n    yield "text"\n')
    assert "my-own" in registry.list_plug_ins("sources")
    assert registry.read_summary("sources", "my-own") == "My own."
    source = registry.load_plug_in(SOURCES, "MY_OWN")
    assert source.documents is not None and list(source.documents()) == ["text"]


def test_a_broken_task_fails_with_one_message(
    plug: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plug("tasks/bad.py", '"""Bad."""\ndef (\n')
    assert main(["direct", "--", "bad"]) == 1
    assert "plugins/tasks/bad.py:2: " in capsys.readouterr().err
    assert main(["--help"]) == 0, "help does not import it"


def test_an_exception_of_a_plug_in_names_its_file(
    plug: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plug("tasks/bad.py", TASK.partition("    text =")[0] + "    return options.name / 0\n")
    assert main(["direct", "--", "bad", "Ann"]) == 1
    error = capsys.readouterr().err
    line = TASK.partition("    text =")[0].count("\n") + 1
    assert f"plugins/tasks/bad.py:{line} failed: TypeError: unsupported operand" in error
    assert "report" not in error
    plug("tasks/worse.py", TASK.partition("    text =")[0] + "    import json\n    json.loads('{')\n")
    assert main(["direct", "--", "worse", "Ann"]) == 1
    assert "plugins/tasks/worse.py:20 failed: JSONDecodeError" in capsys.readouterr().err


def test_an_exception_of_the_package_names_the_plug_in_that_called_it(
    plug: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    body = "    from primus.config.text_file import format_path\n    format_path(3)\n"
    plug("tasks/bad.py", TASK.partition("    text =")[0] + body)
    assert main(["direct", "--", "bad", "Ann"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("primus-cli: internal error at ")
    assert "config/text_file.py:" in error
    assert "bad.py:20; show the traceback: add --debug" in error
    assert "report this" not in error


def test_an_unknown_level_fails_with_one_message(
    plug: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plug("runtimes/moon.py", RUNTIME.replace('"container"', '"orbit"'))
    assert main(["moon", "--", "direct", "--", "runs", "list"]) == 1
    assert "runtime 'moon': invalid LEVEL 'orbit'\n  use one of cluster, container, node" in capsys.readouterr().err


def test_entry_points_of_an_installed_package_add_plug_ins(tmp_path: Path) -> None:
    site = tmp_path / "site"
    metadata = site / "moonshot-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: moonshot\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[primus.tasks]\nsay.good_day = moonshot.hello\n\n[primus.runtimes]\nmoon = moonshot.moon\n\n"
        "[primus.frameworks]\nthinking = moonshot.thinking\nabsent = moonshot.absent\nfar = moonshot.far\n\n"
        "[primus.backends]\nolder = moonshot.thinking\n"
    )
    (site / "moonshot").mkdir()
    for name, text in {"__init__": "", "hello": TASK, "moon": RUNTIME, "thinking": BACKEND}.items():
        (site / "moonshot" / f"{name}.py").write_text(text)
    (site / "moonshot/far").mkdir()
    (site / "moonshot/far/__init__.py").write_text(BACKEND)
    reader = (
        (Path(cli.SOURCE).parent / "examples/plug-ins/frameworks/counting/logs.py")
        .read_text()
        .replace('"counting"', '"far"')
    )
    (site / "moonshot/far/logs.py").write_text(reader)
    (tmp_path / "far.log").write_text("count 1 loss 0.5\ncount 2 loss 0.25\n")
    path = f"{cli.SOURCE}:{site}"

    def run(*words: str) -> str:
        done = cli.run(*words, cwd=tmp_path, PYTHONPATH=path)
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    assert "say good-day" in run("--help")
    assert run("moon", "--", "say", "good_day", "Ann").endswith("primus-cli direct -- say good-day Ann\n")
    assert run("direct", "--", "say", "good-day", "Ann") == "hello Ann\n"
    (tmp_path / "e.yaml").write_text("modules:\n  pre_trainer: {framework: thinking, model: tiny, config: ./t.yaml}\n")
    (tmp_path / "t.yaml").write_text(TRAINER)
    assert "e.yaml: valid (thinking, e)" in run("direct", "--", "config", "check", "--config", "e.yaml")
    assert "e.yaml: valid (older, e)" in run(
        "direct", "--", "config", "check", "--config", "e.yaml", "--framework=older"
    )
    assert '"format": "far"' in run("direct", "--", "compare", "extract", "far.log", "--json")
    assert "framework 'absent' cannot be loaded" in run(
        "direct", "--", "config", "check", "--config", "e.yaml", "--framework=absent"
    )


@pytest.mark.parametrize(
    ("body", "words", "message"),
    [
        ("return 256", (), "the task returned exit code 256\n  return a number from 0 to 255"),
        ("return -1", (), "the task returned exit code -1"),
        (
            "context.result(object(), 'a')",
            ("--json",),
            "the result of the task cannot be printed as JSON: Encoding objects of type object is unsupported",
        ),
    ],
)
def test_a_result_that_cannot_be_passed_on_is_refused(
    plug: Callable[[str, str], None],
    capsys: pytest.CaptureFixture[str],
    body: str,
    words: tuple[str, ...],
    message: str,
) -> None:
    plug("tasks/odd.py", TASK.partition("    text =")[0] + f"    {body}\n")
    assert main(["direct", "--", "odd", "Ann", *words]) == 1
    assert f"primus-cli: {message}" in capsys.readouterr().err
