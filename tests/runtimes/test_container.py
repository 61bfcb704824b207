"""A container's command line: what each engine needs for each maker's GPUs, and whose options win."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from fakes.nodes import node
from primus import registry
from primus.cli.main import main
from primus.errors import UsageError
from primus.launch import inherited_variables
from primus.launch.command import parse_command
from primus.machine.facts import MachineFacts
from primus.plan import BindMount, LaunchPlan, PlanContext, Variable, format_plan
from primus.runtimes.container import container_plan, mounts
from primus.runtimes.container.options import parse

CHECKOUT = str(registry.PACKAGE.parents[1])
INNER = ("/code/primus-cli", "direct", "--", "train", "pretrain", "--run", "/ws/night/20260101_000000-abcd")
AMD, NVIDIA, CPU = node(), node(model="H100", num_links=18), MachineFacts()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a node with device nodes of two groups; the user is not root, and has a limit of open files."""
    for name in ("dev/kfd", "dev/dri/renderD128", "dev/dri/renderD129", "dev/infiniband/uverbs0", "proc/self/status"):
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text("CapEff:\t0000000000000000\n")
    groups = {"kfd": 109, "renderD128": 44, "renderD129": 109}
    real = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        found = real(self, **options)
        return os.stat_result([*found[:5], groups[self.name], *found[6:]]) if self.name in groups else found

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr("resource.getrlimit", lambda number: (1024, 524288))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getgid", lambda: 100)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("primus.package_files.CHECKOUT", Path("/code"))
    monkeypatch.setattr(Path, "is_file", lambda self: str(self) == "/code/primus-cli")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "root"


def context(facts: MachineFacts = CPU, is_here: bool = True, **environ: str) -> PlanContext:
    return PlanContext(
        environ={"PATH": "/nowhere", **environ},
        python=sys.executable,
        facts=lambda master: facts,
        is_here=is_here,
        directory="/ws/night/20260101_000000-abcd",
        attempt=2,
        name="night",
    )


def planned(words: str, where: PlanContext, root: Path = Path("/"), **env: Variable) -> LaunchPlan:
    return container_plan.plan_container(LaunchPlan(argv=INNER, env=env), parse(words.split()), where, root)[0]


def argv(words: str, where: PlanContext, root: Path = Path("/")) -> list[str]:
    return list(planned(f"--image img {words}", where, root).argv)


def values(words: list[str], option: str) -> list[str]:
    return [after for word, after in itertools.pairwise(words) if word == option]


@pytest.mark.parametrize(
    ("name", "words", "facts"),
    [
        ("docker-amd", "--engine docker", AMD),
        ("docker-nvidia", "--engine docker --image img", NVIDIA),
        ("docker-cpu", "--engine docker --image img", CPU),
        ("podman-amd", "--engine podman --image img", AMD),
        ("podman-nvidia", "--engine podman --image img", NVIDIA),
        ("apptainer-amd", "--engine apptainer --image /images/rocm.sif", AMD),
        ("apptainer-nvidia", "--engine apptainer --image nvcr.io/nvidia/pytorch:25.10-py3", NVIDIA),
        ("apptainer-contained", "--engine singularity --image a.sif --containall", AMD),
        ("docker-user", "--engine docker --image img --user --no-devices", AMD),
        ("podman-user", "--engine podman --image img --user", AMD),
    ],
)
def test_the_plan_of_each_engine(
    name: str, words: str, facts: MachineFacts, root: Path, golden: Callable[[str, str], None]
) -> None:
    environ = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "canary", "PYTHONPATH": "/mine", "USER": "ann"}
    options = f"{words} --mount /data:/data:ro --env EXPERIMENT=7 --env PATH=/opt/bin"
    plan = planned(options, context(facts, **environ), root)
    text = format_plan(plan).replace(os.getcwd(), "/here")
    assert "canary" not in text
    golden(f"container/{name}.txt", text + "\n")


def test_on_another_machine_what_depends_on_the_node_is_left_to_it(
    root: Path, golden: Callable[[str, str], None]
) -> None:
    def fail(master: str | None) -> MachineFacts:
        raise AssertionError("another machine's facts were read")

    where = structs.replace(context(is_here=False), facts=fail)
    golden("container/elsewhere.txt", format_plan(planned("", where, root)).replace(os.getcwd(), "/here") + "\n")


def test_an_image_is_needed_where_there_is_no_default(root: Path) -> None:
    for facts in (CPU, NVIDIA):
        with pytest.raises(UsageError, match="no image is given"):
            planned("--engine docker", context(facts), root)
    assert "rocm/primus:v26.5" in planned("--engine docker", context(AMD), root).argv
    assert "mine" in planned("--engine docker", context(CPU, DOCKER_IMAGE="mine"), root).argv
    assert "typed" in planned("--engine docker --image typed", context(CPU, DOCKER_IMAGE="mine"), root).argv


def test_a_command_line_wins_over_the_variable_and_that_over_what_is_on_path(tmp_path: Path) -> None:
    for name in ("podman", "apptainer"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    found = {"PATH": str(tmp_path)}
    assert argv("", context(**found))[0] == "podman"
    assert argv("", context(**found, PRIMUS_CONTAINER_ENGINE="apptainer"))[0] == "apptainer"
    assert argv("--engine docker", context(**found, PRIMUS_CONTAINER_ENGINE="apptainer"))[0] == "docker"
    assert planned("--image a.sif", context(**found)).argv[0] == "apptainer"
    assert "no engine is on PATH" in " ".join(planned("--image img", context()).notes)
    with pytest.raises(UsageError, match=r"docker cannot run a\.sif"):
        planned("--image a.sif --engine docker", context())
    with pytest.raises(UsageError) as error:
        planned("--image img --engine dokcer", context())
    assert "did you mean 'docker'?" in error.value.hint


@pytest.mark.parametrize(
    ("typed", "absent"),
    [
        ("--network bridge", "host"),
        ("--net=none", "--network"),
        ("--ipc=private", "host"),
        ("--ulimit memlock=1:1", "memlock=524288:524288"),
        ("--security-opt seccomp=my.json", "seccomp=unconfined"),
        ("--stop-timeout 3", "600"),
        ("-w /elsewhere", "--workdir"),
        ("--init=false", "--init"),
        ("--group-add 7", "keep-groups"),
        ("--device /dev/dri/renderD128", "/dev/dri"),
        ("--device=amd.com/gpu=0", "/dev/kfd"),
        ("--device /dev/infiniband/uverbs0", "/dev/infiniband"),
    ],
)
def test_an_option_of_the_user_replaces_ours_of_its_kind(typed: str, absent: str, root: Path) -> None:
    ours = argv("--engine podman", context(AMD), root)
    words = argv(f"--engine podman {typed}", context(AMD), root)
    assert absent in ours
    start = words.index("img") - len(typed.split())
    assert words[start : words.index("img")] == typed.split(), "as typed, and last"
    if absent == "host":
        option = "--network" if "network" in typed else "--ipc"
        assert "host" not in values(words, option)
    else:
        assert absent not in words[:start]


def test_podman_is_not_given_the_host_s_shared_memory_with_a_size_of_one_s_own(root: Path) -> None:
    assert "--ipc" not in argv("--engine podman --shm-size 64g", context(), root)


def test_gpus_that_the_user_chooses_are_the_only_ones(root: Path) -> None:
    words = argv('--engine docker --gpus "device=0,1"', context(NVIDIA), root)
    assert values(words, "--gpus") == ['"device=0,1"']
    words = argv("--engine podman --device nvidia.com/gpu=1", context(NVIDIA), root)
    assert values(words, "--device") == ["/dev/infiniband", "nvidia.com/gpu=1"]
    assert "nvidia.com/gpu=all" not in words


def test_two_choices_among_gpus_are_warned_of(root: Path) -> None:
    where = context(NVIDIA, CUDA_VISIBLE_DEVICES="1")
    assert "warning" not in " ".join(planned("--image img --engine docker", where, root).notes)
    warned = planned("--image img --engine docker --gpus all", where, root).notes
    assert "warning: CUDA_VISIBLE_DEVICES selects among the GPUs" in " ".join(warned)


def test_help(capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]) -> None:
    assert main(["container", "--help"]) == 0
    golden("container/help.txt", capsys.readouterr().out)


def test_never_more_rights_than_are_needed(root: Path) -> None:
    for facts in (AMD, NVIDIA, CPU):
        for engine in ("docker", "podman", "apptainer"):
            words = argv(f"--engine {engine}", context(facts), root)
            assert "--privileged" not in words
            assert values(words, "--cap-add") == ([] if engine == "apptainer" else ["SYS_PTRACE"])


def test_limits_are_those_that_the_starting_process_may_set(root: Path) -> None:
    words = argv("--engine podman", context(), root)
    assert values(words, "--ulimit") == ["memlock=524288:524288", "nofile=524288:524288", "stack=524288:524288"]
    (root / "proc/self/status").write_text("CapEff:\t000001ffffffffff\n")
    full = ["memlock=-1:-1", "nofile=1048576:1048576", "stack=67108864:67108864"]
    assert values(argv("--engine podman", context(), root), "--ulimit") == full
    assert values(argv("--engine docker", context(), root), "--ulimit") == full


def test_a_machine_without_devices_is_planned_for(tmp_path: Path) -> None:
    words = argv("--engine docker", context(AMD), tmp_path)
    assert values(words, "--device") == ["/dev/kfd", "/dev/dri"]
    assert "--group-add" not in words


def test_options_of_the_engine_pass_through_as_typed() -> None:
    typed = "--cap-add SYS_NICE --device=/dev/fuse --tmpfs /x:size=1g --dns 1.1.1.1 -p 80:80 --read-only"
    words = argv(f"--engine docker {typed}", context())
    end = words.index("img")
    assert words[end - len(typed.split()) : end] == typed.split()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("image", "unexpected argument 'image'"),
        ("--cap-add A B", "unexpected argument 'B'"),
        ("--image", "--image needs a value"),
        ("--image a --image b", "--image is given twice: a and b"),
        ("--grace soon", "--grace soon: expected float"),
        ("--grace -1", "--grace -1: expected float >= 0"),
        ("--image --rm", "--image --rm is an option"),
        ("-d", "primus waits for its container"),
        ("--detach=true", "primus waits for its container"),
        ("--label token=canary", "a secret must not be"),
        ("--registry-password canary", "a secret must not be"),
    ],
)
def test_what_cannot_be_is_refused(words: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as error:
        parse(words.split())
    assert "canary" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--mount /a:/b:/c:ro", "expected SRC"),
        ("--mount /a:b", "with an absolute DST"),
        ("--mount :", "expected SRC"),
        ("--env=", "'' is not a valid variable name"),
        ("--mount /a:/b:rx", "expected SRC"),
        ("--name -x --engine docker", "letters, digits"),
        ("--name x/y --engine docker", "letters, digits"),
        ("--name xy --engine apptainer", "does not name containers"),
        ("--env DOCKER_AUTH=1 --engine docker", "cannot be passed by name"),
        ("--env NO_SUCH_VARIABLE --engine docker", "NO_SUCH_VARIABLE: No such file"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        argv(words, context())


def test_mounts_are_of_the_same_place_unless_another_is_named(root: Path) -> None:
    words = "--mount /data -v /models:/m:ro --volume=./x:/x"
    asked = planned(f"--image img --engine docker {words}", context(), root).mounts
    here = os.getcwd()
    assert asked[:3] == (BindMount("/data", "/data"), BindMount("/models", "/m", True), BindMount(f"{here}/x", "/x"))
    assert {mount.target for mount in asked[3:]} == {"/code", "/ws", here}


def test_volumes_that_the_engine_keeps_and_its_own_syntax_pass_through() -> None:
    words = argv("--engine docker -v cache:/cache --mount type=tmpfs,target=/t", context())
    assert "cache:/cache" in values(words, "--volume")
    assert "type=tmpfs,target=/t" in values(words, "--mount")


def test_the_name_of_a_folder_here_is_not_taken_for_a_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    with pytest.raises(
        UsageError, match=r"'data' is a volume of the engine, and also a folder here\n  write \./data:/d"
    ):
        argv("--engine docker --mount data:/d", context())


def test_a_folder_inside_another_mount_is_not_mounted_again() -> None:
    def merged(ours: list[str], theirs: list[BindMount]) -> list[str]:
        return [mount.target for mount in mounts.merge_mounts([BindMount(each, each) for each in ours], theirs)]

    assert merged(["/a/b", "/a", "/ab", "/a"], []) == ["/a", "/ab"]
    assert merged(["/a/b"], [BindMount("/a", "/a")]) == ["/a"]
    assert merged(["/a/b"], [BindMount("/a", "/a", is_read_only=True)]) == ["/a", "/a/b"], "it is written to"
    assert merged(["/a/b"], [BindMount("/x", "/a")]) == ["/a", "/a/b"], "the same place holds something else"
    assert merged(["/a"], [BindMount("/x", "/a")]) == ["/a"], "the user's word"
    with pytest.raises(UsageError, match="the root folder"):
        merged(["/"], [])


def test_paths_with_colons_commas_and_quotes_are_written_as_the_engines_read_them() -> None:
    for path, written in {
        "/a:b": "type=bind,source=/a:b,target=/a:b",
        "/a,b": 'type=bind,"source=/a,b","target=/a,b"',
        '/a"b': 'type=bind,"source=/a""b","target=/a""b"',
    }.items():
        for engine in ("docker", "apptainer"):
            container, _ = container_plan.build_container(parse(["--image", "img", "--engine", engine]), context())
            from primus.runtimes.container import engines

            container = structs.replace(container, mounts=(BindMount(path, path),))
            words = engines.build_engine_command(container, parse([]), (), {}, ())
            asked = values(list(words), "--mount") + values(list(words), "--bind")
            assert asked == ([written] if engine == "docker" or set(path) & set(":,") else [f"{path}:{path}"])


def test_folders_that_variables_name_are_mounted_with_them(tmp_path: Path) -> None:
    for name in ("plugins", "cache"):
        (tmp_path / name).mkdir()
    environ = {"PRIMUS_PLUGINS": f"{tmp_path}/plugins:{tmp_path}/absent", "HF_HOME": f"{tmp_path}/cache"}
    found = {mount.target for mount in planned("--image img --engine docker", context(**environ)).mounts}
    assert {f"{tmp_path}/plugins", f"{tmp_path}/cache"} <= found
    assert f"{tmp_path}/absent" not in found


def test_variables_of_a_run_are_passed_on_and_those_of_this_machine_are_not() -> None:
    ours = "PRIMUS_TEAM SLURM_JOB_ID PET_NNODES MASTER_ADDR NNODES NCCL_IB_HCA HF_TOKEN https_proxy OMP_NUM_THREADS"
    theirs = (
        "PATH HOME PYTHONPATH LD_LIBRARY_PATH LD_PRELOAD CUDA_HOME ROCM_PATH HSA_PATH PRIMUS_PYTHON SLURM_JWT EDITOR"
    )
    theirs += " PRIMUS_LAUNCHER_PID"
    odd = ["NCCL_*", "HF_A B", "PRIMUS_\n"]
    assert set(
        inherited_variables.list_inherited_names(dict.fromkeys([*ours.split(), *theirs.split(), *odd], "1"))
    ) == set(ours.split())


def test_typed_variables_win_over_the_experiment_s_inside() -> None:
    plan = planned("--image img --engine docker --env A=1 -e B", context(B="2"))
    assert plan.inner is not None
    assert plan.inner.argv[1:7] == ("direct", "--env", "A", "--env", "B", "--")
    assert {name: each.value for name, each in plan.env.items()} == {"A": "1", "B": "2"}
    assert values(list(plan.argv), "--env")[:2] == ["A", "B"]


def test_variables_that_the_client_reads_itself_stand_in_the_inner_command() -> None:
    plan = planned("--image img --engine docker --env LD_PRELOAD=/x.so --env HOME=/root", context())
    assert plan.env == {}
    assert plan.inner is not None
    assert plan.inner.argv[2:6] == ("--env", "LD_PRELOAD=/x.so", "--env", "HOME=/root")
    assert plan.argv[-len(plan.inner.argv) :] == plan.inner.argv


def test_a_shell_gets_what_the_task_would_get() -> None:
    task = argv("--engine docker --device /dev/fuse --env A=1", context(AMD))
    shell = argv("--engine docker --device /dev/fuse --env A=1 --shell", context(AMD))
    until = task.index("--workdir")

    def plain(words: list[str]) -> list[str]:
        return [word for word in words[: words.index("img")] if word not in ("-i", "-t", "600", "5")]

    assert plain(shell) == plain(task) and until
    assert "-i" in shell and "-t" not in shell, "standard input is no terminal here"
    assert shell[-3:-1] == ["sh", "-c"]
    notes = planned("--image img --engine docker --env A=1 --shell", context()).notes
    assert notes[-1].startswith("the task would be: /code/primus-cli direct --env A -- train pretrain")


def test_names_are_of_the_run_the_attempt_and_the_node() -> None:
    where = context(NODE_RANK="3")
    assert values(argv("--engine docker", where), "--name") == ["primus-20260101_000000-abcd-2-3"]
    assert values(argv("--engine docker --name mine", where), "--name") == ["mine"]
    labels = values(argv("--engine docker", where), "--label")
    assert labels == ["primus.run=20260101_000000-abcd", f"primus.user={os.getuid()}", "primus.node=3"]


def test_a_secret_that_was_typed_stays_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("--image img --engine docker --env A_TOKEN", context(), A_TOKEN=Variable("canary", "--env", True))
    assert "canary" not in " ".join(plan.argv) + format_plan(plan)
    assert plan.env["A_TOKEN"].value == "canary"


def test_a_shell_without_a_task_stands_alone() -> None:
    assert parse_command(["container", "--image", "img", "--shell"]).request.task == ""
    assert parse_command(["container", "--shell", "--", "runs", "list"]).request.task == "runs list"
    assert parse_command(["container", "--clean"]).request.task == ""
    with pytest.raises(UsageError, match="cannot run inside"):
        parse_command(["slurm", "srun", "--", "container", "--image", "img", "--shell"])
