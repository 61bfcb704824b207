"""Jobs of Kubernetes as they would be sent: golden manifests, values that survive them, and names."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fakes import cli
from primus.runs.store import Run
from primus.runtimes.kubernetes import job_spec, manifest_yaml, manifests, node_script, objects, pod
from primus.runtimes.kubernetes.options import Options
from primus.runtimes.kubernetes.target import JobSpec

EXPERIMENT = """\
exp_name: night
env: {MY_API_KEY: canary-experiment}
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 3}}}
"""
HOSTILE = "a b\"c'd$(E)`f`\ng,h=i;*\\ü😀\t$$(X)$${Y}$ -- #: {[|>&!%@"
SECRETS = {"HF_TOKEN": "canary-shell"}


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    return tmp_path


def dry_run(workplace: Path, *words: str, code: int = 0, **env: str | None) -> str:
    done = cli.run("--dry-run", "k8s", *words, cwd=workplace, HOME=str(workplace), KUBECONFIG=None, **env)
    assert done.returncode == code, done.stderr
    assert "canary" not in done.stdout + done.stderr
    assert sorted(path.name for path in workplace.iterdir()) == ["night.yaml"], "a dry run touches nothing"
    return done.stdout if code == 0 else done.stderr


def documents(workplace: Path, *words: str, **env: str | None) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(dry_run(workplace, *words, **env)) if each}


def pod_of(jobset: Any) -> Any:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def settled(printed: str) -> str:
    """`printed` without what differs from run to run, and without the run folder's files."""
    printed = re.sub(r"\d{8}([_-])\d{6}-[0-9a-f]{4}", r"20260101\g<1>000000-abcd", printed)
    texts = r'^  ((?:config|metadata|request)\.\S*): (?:".*"\n|\|\n(?:    .*\n|\n)*)'
    return re.sub(texts, r"  \1: (its text)\n", printed, flags=re.M)


EXP = ("--exp", "night.yaml", "--image", "rocm/primus:v26.5")
FORMS = {
    "amd-2x8": ("create", "--replica", "2", "--gpu", "8", *EXP, "--memory", "1Ti", "--volume", "runs:/runs"),
    "nvidia": (
        *("create", "--vendor", "nvidia", "--gpu", "8", "--rdma", "rdma/hca_shared_devices_a=8", *EXP),
        *("--shm", "256Gi", "--secret", "WANDB_API_KEY=wandb/key", "--pull-secret", "registry", "--ttl", "600"),
    ),
    "cpu": ("create", "--gpu", "0", "--cpu", "2", *EXP),
    "nodelist": (
        *("create", "--replica", "2", "--nodelist", "n1,n2", "--nodelist=n3", "--exclude", "n2,n9", *EXP),
        *(
            "--queue",
            "team",
            "--placement",
            "near",
            "--priority-class",
            "high",
            "--service-account",
            "trainer",
            "--max-restarts",
            "0",
        ),
    ),
    "host-network": ("create", "--replica", "2", "--host-network", "--port", "29777", "--rdma", "rdma/hca=8", *EXP),
    "trainjob": (
        "create",
        "--target",
        "trainjob",
        "--replica",
        "2",
        *EXP,
        "--volume",
        "runs:/runs",
        "--queue",
        "team",
        "--placement",
        "cloud.provider.com/topology-rack",
    ),
    "trainjob-host-network": (
        *("create", "--target", "trainjob", "--replica", "2", "--host-network", "--vendor", "nvidia", *EXP),
        *("-n", "ml", "--max-restarts", "5"),
    ),
    "hostile": (
        *("create", "--gpu", "0", "--name", "Mäx's $(job)", "--env", f"VALUE={HOSTILE}", "--env", "FLAG=y", "--env"),
        *("NUMBER=1e3", "--volume", "/on/node/a b:/runs/ü $(X)", "--workdir", "/a b/$(X)", *EXP),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_manifests_are_these(workplace: Path, form: str, golden: Callable[[str, str], None]) -> None:
    golden(f"kubernetes/{form}.yaml", settled(dry_run(workplace, *FORMS[form], **SECRETS)))


def test_help_has_the_commands(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    golden("help/kubernetes.txt", cli.run("k8s", "create", "--help", cwd=tmp_path).stdout)


def test_a_task_is_typed_as_with_every_other_runtime(workplace: Path) -> None:
    task = ("--", "train", "pretrain", "--config", "night.yaml", "--train_iters", "2")
    long = documents(workplace, "create", "--image", "X", *task)
    short = documents(workplace, "--image", "X", *task)
    for made in (long, short):
        assert pod_of(made["JobSet"])["containers"][0]["command"][4:-1] == (
            "primus-cli direct -- train pretrain --run".split()
        )
        assert "train_iters: 2" in made["ConfigMap"]["data"]["config.primus_config.yaml"]
    other = documents(workplace, "--image", "X", "--", "preflight", "--quick")
    assert pod_of(other["JobSet"])["containers"][0]["command"][4:] == "primus-cli direct -- preflight --quick".split()


def test_exp_takes_backend_and_data_path(workplace: Path) -> None:
    made = documents(workplace, "create", *EXP, "--backend", "abacus", "--data_path", "/data x")
    config = yaml.safe_load(made["ConfigMap"]["data"]["config.primus_config.yaml"])
    module = config["modules"]["pre_trainer"]
    assert (module["framework"], module["overrides"]["data_path"]) == ("abacus", "/data x")


def test_json_is_a_list_that_kubectl_takes(workplace: Path) -> None:
    made = json.loads(dry_run(workplace, "create", *EXP, "--json"))
    assert (made["kind"], [each["kind"] for each in made["items"]]) == ("List", ["ConfigMap", "JobSet"])


def test_a_folder_on_a_shared_volume_is_called_there_as_it_is_here(workplace: Path) -> None:
    made = documents(workplace, "create", *EXP, "--volume", f"shared:{workplace}")
    command = pod_of(made["JobSet"])["containers"][0]["command"]
    assert command[2].startswith(f"{workplace}/output/night/")
    assert command[-1] == command[2]


@pytest.mark.parametrize(
    ("typed", "folder"),
    [
        (("data:/data:ro", "runs:/runs"), "/runs/night/"),
        (("data:/data:ro",), "/primus/output/night/"),
        (("shared:{here}:ro", "runs:/runs"), "/runs/night/"),
        (("shared:{here}:ro", "runs:{here}/output"), "{here}/output/night/"),
        (("shared:{here}", "runs:{here}/output:ro"), "{here}/night/"),
    ],
)
def test_a_run_folder_lies_where_it_can_be_written(typed: tuple[str, ...], folder: str, workplace: Path) -> None:
    words = [word for volume in typed for word in ("--volume", volume.format(here=workplace))]
    pod = pod_of(documents(workplace, "create", *EXP, *words)["JobSet"])
    place = pod["containers"][0]["command"][2]
    assert place.startswith(folder.format(here=workplace))
    mounts = [each for each in pod["containers"][0]["volumeMounts"] if place.startswith(each["mountPath"] + "/")]
    assert not max(mounts, key=lambda mount: len(mount["mountPath"])).get("readOnly")


@pytest.mark.parametrize("words", [("--hf_token", "canary"), ("--hf_token=canary",), ("--env", "HF_TOKEN=canary")])
def test_a_token_is_named_and_not_shown(workplace: Path, words: tuple[str, ...]) -> None:
    made = documents(workplace, "create", *EXP, *words)
    env = {each["name"]: each for each in pod_of(made["JobSet"])["containers"][0]["env"]}
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["key"] == "HF_TOKEN"
    assert "MY_API_KEY" in env, "what the experiment's file hides is passed on as well"
    typed = documents(workplace, "create", *EXP, *words, "--secret", "HF_TOKEN=mine/token")
    env = {each["name"]: each for each in pod_of(typed["JobSet"])["containers"][0]["env"]}
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "token"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("create", "--exp", "night.yaml"), "needs --image"),
        (("create", "--image", "X"), "create needs a task"),
        (("create", *EXP, "--", "preflight"), "--exp cannot be combined"),
        (("create", "--image", "X", "--backend", "abacus", "--", "preflight"), "--backend needs --exp"),
        (("create", *EXP, "--replica", "0"), "--replica 0: expected int >= 1"),
        (("create", *EXP, "--ttl", "-1"), "--ttl -1: expected int >= 0"),
        (("create", *EXP, "--port", "70000"), "--port 70000: expected int <= 65535"),
        (("create", *EXP, "--nodelist", ","), "--nodelist contains no node"),
        (("logs", "x", "--tail", "-3"), "--tail -3: expected int >= 0"),
        (("wait", "x", "--timeout", "-1"), "--timeout -1: expected float >= 0"),
        (("create", *EXP, "--replica", "3", "--nodelist", "a,b"), "--replica 3 needs more than 2 nodes"),
        (("create", *EXP, "--volume", "runs"), "expected CLAIM:/path"),
        (("create", *EXP, "--memory", "much"), "--memory much is not a quantity"),
        (("create", *EXP, "--rdma", "8"), "expected RESOURCE=N"),
        (("create", *EXP, "--secret", "X=Y"), "expected NAME=SECRET/KEY"),
        (("create", *EXP, "--env", "NOT_SET_HERE"), "the variable is not set"),
        (("create", *EXP, "--env", "a b=c"), "not a valid variable name"),
        (("create", *EXP, "--target", "trainjob", "--ttl", "5"), "trainjob does not support --ttl"),
        (("create", *EXP, "--target", "trainjob", "--env", "PET_NNODES=2"), "which Kubeflow Trainer sets itself"),
        (("create", *EXP, "--target", "safe"), "needs --url"),
        (("create", *EXP, "--gpus", "8"), "did you mean '--gpu'"),
        (("--image", "X", "--", "container", "--image", "Y", "--", "preflight"), "the pod is the container"),
        (("lst",), "lst"),
        (("create", *EXP, "--follow"), "create does not support --follow"),
        (("list", "--gpu", "4"), "list does not support --gpu"),
        (("get",), "needs the name of a job"),
        ((), "primus-cli kubernetes create|get|list"),
        (("list", "--workload-id"), "expected one argument"),
    ],
)
def test_what_cannot_be_meant_is_refused(workplace: Path, words: tuple[str, ...], said: str) -> None:
    assert said in dry_run(workplace, *words, code=2)


def test_a_run_folder_that_does_not_fit_is_refused(workplace: Path) -> None:
    with pytest.raises(Exception, match="more than the 1048576 of a ConfigMap; the largest is big"):
        manifests.build_manifests(ordered(files={"big.txt": "x" * (1 << 20), "small.txt": "x"}))


def ordered(**changes: Any) -> JobSpec:
    """An order of a job with two nodes."""
    given = {
        "options": Options(image="X", replica=2),
        "name": "job",
        "run_id": "run",
        "directory": "/d",
        "inside": "/i",
    }
    return JobSpec(**{**given, "command": ("true",), **changes})


def expanded(value: str, variables: dict[str, str]) -> str:
    """`value` as the kubelet expands it (k8s.io/kubernetes/third_party/forked/golang/expansion)."""
    out, at = "", 0
    while at < len(value):
        if value[at] != "$" or at + 1 == len(value):
            out, at = out + value[at], at + 1
        elif value[at + 1] == "(" and ")" in value[at:]:
            end = value.index(")", at)
            name = value[at + 2 : end]
            out, at = out + variables.get(name, f"$({name})"), end + 1
        else:
            out, at = out + ("$" if value[at + 1] == "$" else value[at : at + 2]), at + 2
    return out


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
FILES = st.dictionaries(TEXTS.filter(lambda name: name.strip("./ ") and "/" not in name), TEXTS, max_size=4)


@given(words=st.lists(TEXTS, max_size=4), value=TEXTS, files=FILES)
@example(
    words=[HOSTILE, "$", "$$", "$(A)", "$$(A)", "", "y", "1e3", "0o7", "12:30", "~"],
    value=HOSTILE,
    files={"a b": HOSTILE},
)
@example(words=["x" * 100_000], value="\n" * 1000 + "ü" * 100_000, files={"ü": " \n\ta", "node.sh": "x", "é": "y"})
@settings(max_examples=60, deadline=None)
def test_values_are_the_same_behind_yaml_and_kubernetes(words: list[str], value: str, files: dict[str, str]) -> None:
    wanted = ordered(command=tuple(words), env={"A": value}, files=files)
    read = list(yaml.safe_load_all(manifest_yaml.format_yaml_documents(manifests.build_manifests(wanted))))
    assert read == manifests.build_manifests(wanted)
    container = pod_of(read[1])["containers"][0]
    variables = {"A": "evaluated"}
    assert [expanded(word, variables) for word in container["command"]][4:] == words
    assert {each["name"]: expanded(each["value"], variables) for each in container["env"] if each["name"] == "A"} == {
        "A": value
    }
    items = {each["path"]: each["key"] for each in pod_of(read[1])["volumes"][1]["configMap"]["items"]}
    assert all(re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key) for key in items.values())
    assert {
        path.removeprefix("files/"): read[0]["data"][key] for path, key in items.items() if path != node_script.SCRIPT
    } == files


NAMES = st.one_of(st.none(), st.text(max_size=80))


@given(typed=NAMES, experiment=st.text(max_size=80), nodes=st.integers(1, 9999))
@example(typed="a" * 60, experiment="", nodes=1)
@example(typed="8b", experiment="8b", nodes=1)
@example(typed="", experiment="ü", nodes=1)
def test_names_of_pods_are_labels_of_dns(typed: str | None, experiment: str, nodes: int) -> None:
    run = "20261121_200405-ab12"
    name = job_spec.job_name(Options(name=typed, replica=nodes), experiment, run)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", f"{name}-node-0-{nodes - 1}-abcde")
    assert len(f"{name}-node-0-{nodes - 1}-abcde") <= 63
    if typed is None:
        assert name.endswith("20261121-200405-ab12")
    assert job_spec.job_name(Options(name="llama3-8b"), experiment, run) == "llama3-8b"


@given(typed=NAMES, experiment=st.text(max_size=80), nodes=st.integers(1, 9999))
@example(typed="a" * 60, experiment="", nodes=1)
@example(typed=None, experiment="llama3.1-405b-pretraining-with-a-long-name", nodes=64)
@example(typed="a", experiment="x", nodes=1)
def test_primus_safe_takes_each_name(typed: str | None, experiment: str, nodes: int) -> None:
    """DisplayNameRule with MaxPytorchJobNameLen of AMD-AGI/Primus-SaFE, whose text says at most 44 characters."""
    run = "20261121_200405-ab12"
    name = job_spec.job_name(Options(name=typed, replica=nodes, url="http://safe"), experiment, run)
    assert re.fullmatch(r"[a-z][-a-z0-9.]{0,44}[a-z0-9]", name) and len(name) <= 44
    if typed is None:
        assert name.endswith("20261121-200405-ab12")


def test_two_names_that_look_alike_stay_two() -> None:
    names = {
        job_spec.job_name(Options(name=name), "x", "r") for name in ("a b", "a.b", "A-b", "a-b", "b" * 70, "b" * 71)
    }
    assert len(names) == 6
    safe = {job_spec.job_name(Options(name=name, url="http://s"), "x", "r") for name in ("b" * 44, "b" * 45, "b" * 46)}
    assert len(safe) == 3


def in_pod(folder: Path, script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(script), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=20,
        env={"PATH": os.environ["PATH"]},
    )


def mounted(folder: Path) -> Path:
    """What a pod sees at /primus/run: links into hidden folders, as the kubelet makes them."""
    data = folder / "mount" / "..data"
    (data / "files" / "config").mkdir(parents=True)
    (data / "files" / "metadata.json").write_text("{}")
    (data / "files" / "config" / "a b.yaml").write_text("a: 1\n")
    (data / "node.sh").write_text(node_script.TEXT)
    for name in ("files", "node.sh"):
        (folder / "mount" / name).symlink_to(f"..data/{name}")
    return folder / "mount" / "node.sh"


def test_pods_that_begin_together_make_one_run_folder(tmp_path: Path) -> None:
    script = mounted(tmp_path)
    run = tmp_path / "vol ume" / "night $(x)" / "r"
    say = f"test -f '{run}/config/a b.yaml' && echo ok"
    pods = [
        subprocess.Popen(["sh", str(script), str(run), ".", "sh", "-c", say], stdout=subprocess.PIPE, text=True)
        for _ in range(12)
    ]
    assert [pod.communicate(timeout=20)[0] for pod in pods] == ["ok\n"] * 12
    assert sorted(path.name for path in run.parent.iterdir()) == ["r"], "no copy is left"
    assert sorted(path.name for path in run.iterdir()) == ["config", "metadata.json"]


def test_a_pod_goes_on_in_a_run_folder_that_is_there_and_passes_words_on(tmp_path: Path) -> None:
    script = mounted(tmp_path)
    run = tmp_path / "r"
    run.mkdir()
    (run / "metadata.json").write_text("theirs")
    (tmp_path / "work place").mkdir()
    done = in_pod(
        tmp_path,
        script,
        str(run),
        str(tmp_path / "work place"),
        "sh",
        "-c",
        'pwd; printf %s "$1"; exit 93',
        "x",
        HOSTILE,
    )
    assert (done.stdout, done.returncode) == (f"{tmp_path}/work place\n{HOSTILE}", 93)
    assert (run / "metadata.json").read_text() == "theirs"


def test_a_run_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    script = mounted(tmp_path)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "other").write_text("in the way")
    done = in_pod(tmp_path, script, str(tmp_path / "r"), ".", "true")
    assert (done.returncode, done.stderr) == (1, f"node.sh: {tmp_path}/r cannot be created\n")


def prepare_pod(workplace: Path, *words: str) -> tuple[list[str], dict[str, str], Path]:
    """The command and variables of the pods of a job, with folders of this machine in place of its volumes."""
    program = workplace / "primus-cli in the image"
    program.write_text(
        f"#!/bin/sh\nexec '{sys.executable}' -c 'import sys; from primus.cli.main import main; sys.exit(main())' \"$@\""
    )
    program.chmod(0o755)
    volume = workplace / "vol ume"
    options = ("--gpu", "0", "--entry", str(program), "--volume", f"claim:{volume}")
    made = cli.run("--dry-run", "k8s", "create", *options, *words, cwd=workplace, HOME=str(workplace))
    assert made.returncode == 0, made.stderr
    config_map, jobset = [each for each in yaml.safe_load_all(made.stdout) if each]
    template = pod_of(jobset)
    mount = workplace / "mount"
    for item in template["volumes"][1]["configMap"]["items"]:
        (mount / item["path"]).parent.mkdir(parents=True, exist_ok=True)
        (mount / item["path"]).write_text(config_map["data"][item["key"]])
    volume.mkdir()
    command = [word.replace(node_script.RUN_FILES, str(mount)) for word in template["containers"][0]["command"]]
    given = {each["name"]: each["value"] for each in template["containers"][0]["env"] if "value" in each}
    return command, cli.environment(**given, MASTER_ADDR="localhost", MY_API_KEY="canary"), volume


def test_what_a_pod_starts_trains_in_its_run_folder_and_goes_on_after_a_restart(workplace: Path) -> None:
    command, environ, volume = prepare_pod(workplace, *EXP)
    environ["NODE_RANK"] = "0"
    for attempt in (1, 2):
        done = subprocess.run(command, cwd=workplace, env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        (run,) = (Run(path) for path in (volume / "night").iterdir() if not path.is_symlink())
        assert (run.read_metadata().outcome.state, run.read_metadata().attempts) == ("done", attempt)
    assert (run.directory / "config" / "primus_config.yaml").is_file()
    assert not (workplace / "output").exists()


@pytest.mark.slow
def test_two_pods_measure_collectives_together(workplace: Path) -> None:
    pytest.importorskip("torch")
    words = ("collectives", "--op", "all_reduce", "--sizes", "64K", "--iters", "10", "--device", "cpu")
    more = ("--duration", "0.1", "--workspace", str(workplace / "vol ume"))
    replicas = ("--image", "X", "--replica", "2", "--name", "two")
    command, environ, volume = prepare_pod(workplace, *replicas, "--", "benchmark", *words, *more)
    with socket.socket() as server:
        server.bind(("localhost", 0))
        environ["MASTER_PORT"] = str(server.getsockname()[1])
    pods = [
        subprocess.Popen(
            command, cwd=workplace, env={**environ, "NODE_RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in ("0", "1")
    ]
    outputs = [pod.communicate(timeout=240)[0].decode() for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    (file,) = volume.glob("benchmark-collectives/2*/report/benchmark.json")
    result = json.loads(file.read_text())
    rows = [row for rank in result["ranks"] for row in rank["rows"]]
    assert (result["world_size"], len(rows), rows[0]["case"]["ranks"]) == (2, 1, 2)
    assert rows[0]["wrong"] == 0 and rows[0]["value"] > 0


def test_every_option_that_a_target_does_not_have_is_refused() -> None:
    with pytest.raises(Exception, match="jobset does not support --priority"):
        objects.check(Options(image="X", priority=1))
    assert pod.escape_variable_references("a$b") == "a$$b"


def test_a_node_label_places_a_jobset_without_a_queue(workplace: Path) -> None:
    label = "cloud.provider.com/topology-rack"
    shown = dry_run(workplace, "create", "--replica", "2", *EXP, "--placement", label)
    assert f"    alpha.jobset.sigs.k8s.io/exclusive-topology: {label}" in shown
    assert "kueue" not in shown


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--placement", "near"), "does not know switches"),
        (("--placement", "rack", "--queue", "team"), "neither near nor any nor a node label"),
        (("--placement", "a.example/rack", "--target", "trainjob"), "a TrainJob is placed by Kueue only"),
        (
            ("--placement", "near", "--url", "https://safe.example.org", "--workspace", "w"),
            "the server places its jobs",
        ),
    ],
)
def test_a_placement_that_nothing_can_give_is_refused(workplace: Path, words: tuple[str, ...], problem: str) -> None:
    done = cli.run("--dry-run", "kubernetes", "create", "--replica", "2", *EXP, *words, cwd=workplace)
    assert (done.returncode, problem in done.stderr) == (2, True), done.stderr
