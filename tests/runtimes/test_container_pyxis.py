"""Containers that srun starts by pyxis: the options it gets, and how its own options are typed by habit."""

from __future__ import annotations

import os

import pytest
from msgspec import structs

from primus.cli.main import main
from primus.errors import UsageError
from primus.launch.command import parse_command
from primus.plan import LaunchPlan, PlanContext, Variable
from primus.runtime import RequestSegment
from primus.runtimes.container import container_plan
from primus.runtimes.container.options import parse
from primus.runtimes.container.pyxis import format_enroot_image

CONTEXT = PlanContext(
    environ={"PATH": "/nowhere", "NCCL_DEBUG": "INFO", "SLURM_CONF": "/etc/slurm.conf", "EDITOR": "vi"},
    python="python",
    is_here=False,
    starts_workers=False,
)
INNER = LaunchPlan(argv=("/code/primus-cli", "direct", "--", "see"), env={"A_TOKEN": Variable("canary", "--env")})


def plan_pyxis(*words: str, context: PlanContext = CONTEXT) -> LaunchPlan:
    return container_plan.plan_container(INNER, parse(["--engine", "pyxis", "--image", "i", *words]), context)[0]


@pytest.mark.parametrize(
    ("image", "enroot"),
    [
        ("ubuntu:22.04", "ubuntu:22.04"),
        ("rocm/primus:v26.5", "rocm/primus:v26.5"),
        ("nvcr.io/nvidia/pytorch:24.01-py3", "nvcr.io#nvidia/pytorch:24.01-py3"),
        ("localhost/a", "localhost#a"),
        ("registry:5000/a/b@sha256:1", "registry:5000#a/b@sha256:1"),
        ("nvcr.io#nvidia/pytorch:24.01-py3", "nvcr.io#nvidia/pytorch:24.01-py3"),
        ("docker://me@nvcr.io#nvidia/pytorch", "docker://me@nvcr.io#nvidia/pytorch"),
        ("dockerd://local:1", "dockerd://local:1"),
        ("/images/a.sqsh", "/images/a.sqsh"),
        ("./a", None),
        ("a.sqsh", None),
    ],
)
def test_images_are_named_as_enroot_reads_them(image: str, enroot: str | None) -> None:
    assert format_enroot_image(image) == (enroot or os.path.abspath(image))


def test_variables_of_the_run_win_over_the_image_and_secrets_go_by_name() -> None:
    plan = plan_pyxis("--env", "B=1", "--container-env=EDITOR")
    assert "--container-env=A_TOKEN,B,NCCL_DEBUG,EDITOR" in plan.step_options
    assert plan.argv == ("/code/primus-cli", "direct", "--env", "B", "--", "see")
    assert plan.env["A_TOKEN"].value == "canary" and "canary" not in " ".join((*plan.argv, *plan.step_options))


def test_an_option_of_pyxis_replaces_ours_and_lists_are_joined() -> None:
    ours = plan_pyxis("--mount", "/data:/d:ro").step_options
    assert {"--no-container-mount-home", "--container-writable", "--no-container-entrypoint"} <= {*ours}
    (mounts,) = [word for word in ours if word.startswith("--container-mounts=")]
    assert mounts.startswith("--container-mounts=/data:/d:ro,")
    typed = ("--container-readonly", "--container-mount-home", "--container-mounts", "/x:/y", "--container-workdir=/w")
    theirs = plan_pyxis(*typed, "--user", "--name", "mine").step_options
    assert not {"--container-writable", "--no-container-mount-home"} & {*theirs}
    assert {"--container-readonly", "--container-mount-home", "--container-workdir=/w"} <= {*theirs}
    assert {"--no-container-remap-root", "--container-name=mine"} <= {*theirs}
    (mounts,) = [word for word in theirs if word.startswith("--container-mounts=")]
    assert mounts.endswith(",/x:/y") and "--container-remap-root" not in theirs


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--network host", "pyxis does not support --network"),
        ("--shell", "pyxis does not support --shell"),
        ("--clean", "pyxis does not support --clean"),
        ("--grace 5", "pyxis does not support --grace"),
        ("--no-devices", "pyxis does not support --no-devices"),
        ("-v cache:/c", "pyxis does not support --volume"),
        ("--mount /a,b", "cannot mount /a,b"),
    ],
)
def test_what_pyxis_cannot_do_is_refused(words: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        plan_pyxis(*words.split())


def test_only_slurm_starts_such_a_container() -> None:
    with pytest.raises(UsageError, match="pyxis is a plug-in of Slurm"):
        plan_pyxis(context=structs.replace(CONTEXT, is_here=True))
    with pytest.raises(UsageError, match=r"docker cannot run a\.sqsh, an image of enroot"):
        container_plan.plan_container(INNER, parse(["--engine", "docker", "--image", "a.sqsh"]), CONTEXT)
    image_file = container_plan.plan_container(INNER, parse(["--image", "a.sqsh"]), CONTEXT)[0]
    assert image_file.step_options, "an image file of enroot needs no --engine"


def test_options_of_pyxis_typed_to_srun_are_those_of_a_container() -> None:
    typed = ["slurm", "sbatch", "-N", "2", "--container-image", "nvcr.io#a/b:1", "--container-mounts=/x:/y", "-t", "10"]
    more = ["--no-container-mount-home", "--restart-delay", "3", "--", "runs", "list"]
    request = parse_command([*typed, *more]).request
    inside = ("--engine", "pyxis", "--image=nvcr.io#a/b:1", "--container-mounts=/x:/y", "--no-container-mount-home")
    assert request.runtimes == (
        RequestSegment("slurm", ("sbatch", "-N", "2", "-t", "10", "--restart-delay", "3")),
        RequestSegment("container", inside),
    )
    with pytest.raises(UsageError, match="a container is given twice"):
        parse_command(["slurm", "--container-image=a", "--", "container", "--image", "b", "--", "runs", "list"])
    with pytest.raises(UsageError, match="--container-image needs a value"):
        parse_command(["slurm", "--container-image", "--", "runs", "list"])
    plain = parse_command(["slurm", "--container=/bundle", "--", "runs", "list"]).request.runtimes
    assert plain == (RequestSegment("slurm", ("--container=/bundle",)),), "a bundle of OCI is for Slurm itself"


def test_each_other_cluster_runtime_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["ssh", "--hosts", "a"], ["kubernetes", "create", "--image", "X"]):
        code = main(["--dry-run", *words, "--", "container", "--engine", "pyxis", "--image", "i", "--", "runs", "list"])
        assert code == 2
        assert f"'{words[0]}' cannot start this container: srun does" in capsys.readouterr().err
