"""`slurm` tells its own words from Slurm's, and plans a step or a job without touching anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.tools import tool
from primus.errors import UsageError
from primus.launch.prepare import find_entry_point
from primus.plan import LaunchPlan, PlanContext, Variable
from primus.runtimes.slurm import parse, wrap
from primus.runtimes.slurm.leaf_switches import fit_to_cluster
from primus.runtimes.slurm.options import find_num_nodes, find_option_value
from primus.runtimes.slurm.script import limit_s
from primus.runtimes.slurm.submit import build_command_environment

DIRECTORY = "/shared/runs/prod/20260102_030405-abcd"
THERE = ("/opt/primus/primus-cli", "direct", "--", "train", "pretrain", "--run", DIRECTORY)
INNER = LaunchPlan(argv=THERE, env={"H": Variable("canary", "--env", is_secret=True)})


def planned(*words: str, there: tuple[str, ...] = THERE, **environ: str) -> LaunchPlan:
    context = PlanContext(environ=environ, python="python", directory=DIRECTORY, there=there, name="prod")
    return wrap(INNER, parse(words), context)


def script_of(plan: LaunchPlan) -> str:
    (text,) = plan.files.values()
    return text.replace(find_entry_point(), "primus-cli")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("two-nodes.sh", ["sbatch", "-N", "2"]),
        (
            "survives.sh",
            "sbatch -N 64 -p gpu-prod -t 72:00:00 --job-name=prod -o logs/train_%j.log -c 96 --gpus-per-node=8 --mem=0 "
            "--exclusive --requeue --max-restarts 5 --restart-delay 10 --spare-nodes 2 --exclude=n[1-3],x7".split(),
        ),
        (
            "quoted.sh",
            ["sbatch", "-J", 'it\'s a "name"', "--comment=$(id) `id` # \\ \u00e9", "-C", "a&b|c", "-e", "my log/%j"],
        ),
    ],
)  # fmt: skip
def test_a_job_is_a_script_that_says_everything(
    golden: Callable[[str, str], None], name: str, words: list[str]
) -> None:
    plan = planned(*words)
    golden(f"slurm/{name}", script_of(plan))
    assert plan.argv == ("sbatch", "--parsable", f"{DIRECTORY}/job.sh")


def test_a_container_on_each_node_is_started_by_the_rest_of_the_chain(golden: Callable[[str, str], None]) -> None:
    container = ("container", "--image", "rocm/primus:v25.10", "--mount", "/my data:/data", "--")
    there = (THERE[0], *container, *THERE[1:])
    golden("slurm/container.sh", script_of(planned("sbatch", "-N", "2", there=there)))


SHARED = (THERE[0], "direct", "--", "data", "encode", "--output", "corpus")


def test_an_array_starts_the_same_command_once_in_each_of_its_jobs() -> None:
    text = script_of(planned("sbatch", "--array=0-15%4", "-t", "60", there=SHARED))
    assert "#SBATCH --array=0-15%4\n" in text
    assert f" --output={DIRECTORY}/logs/slurm-%A_%a.out " in text
    assert "--run" not in text, "its jobs would write one record"
    assert "--signal" not in text, "the other jobs do what is left"
    assert "--signal=B:USR1@600" in script_of(planned("sbatch", "-a", "1-3", "--requeue", there=SHARED))


def test_a_run_that_workers_write_is_no_array() -> None:
    with pytest.raises(UsageError, match="a run folder, which belongs to one job"):
        planned("sbatch", "--array=0-3")


def test_a_step_is_srun_with_safe_options() -> None:
    plan = planned("-N", "2", "-p", "gpu")
    ours = ("--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=60", "--input=none", "--unbuffered")
    assert plan.argv == ("srun", *ours, "-N", "2", "-p", "gpu", *THERE)
    assert not plan.files


def test_what_is_typed_wins_over_the_safe_options() -> None:
    words = ("srun", "-W", "5", "--kill-on-bad-exit=0", "-u", "--input=all")
    assert planned(*words).argv == ("srun", "--ntasks-per-node=1", *words[1:], *THERE)
    assert "--input=none" not in planned("srun", "--pty").argv


def test_variables_and_secrets_stay_in_the_environment() -> None:
    for words in (["-N", "2"], ["sbatch", "-N", "2"]):
        plan = planned(*words)
        assert plan.env == INNER.env
        assert "canary" not in str(plan.argv) + str(plan.files)


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("--export=NONE", "NONE removes this shell's variables and secrets from the job, such as H"),
        ("--export A,B=1", "A,B=1 removes this shell's variables and secrets from the job, such as H"),
        ("--export=H", "H removes this shell's variables and secrets from the job"),
        ("--export=ALL,B=1", None),
        ("-N 2", None),
    ],
)  # fmt: skip
def test_what_does_not_reach_the_job_is_said(words: str, left: str | None) -> None:
    assert planned("sbatch", *words.split()).notes == ((f"warning: --export={left}",) if left else ())


def test_a_line_that_sbatch_would_misread_goes_to_the_command_line() -> None:
    for value in ("a\nb", "", "x" * 5000, "tab\there"):
        plan = planned("sbatch", "--comment", value)
        assert plan.argv[2:-1] == ("--comment", value)
        assert "#SBATCH --comment" not in script_of(plan)


def test_options_are_repeated_where_a_variable_would_overrule_the_script() -> None:
    plan = planned("sbatch", "-p", "gpu", SBATCH_PARTITION="cpu")
    assert plan.argv == ("sbatch", "--parsable", "-p", "gpu", f"{DIRECTORY}/job.sh")


def test_a_placement_becomes_options_of_slurm() -> None:
    near = planned("srun", "-N", "16", "--placement", "near")
    assert "--switches=1@00:05:00" in near.argv
    assert any("as few switches as hold the nodes" in note for note in near.notes)
    assert "--switches=1@365-00:00:00" in planned("sbatch", "-N", "4", "--placement=leaf").argv
    assert "--segment=4" in planned("sbatch", "-N", "4", "--placement=block").argv
    assert "--segment=6" in planned("sbatch", "-N", "4", "--spare-nodes", "2", "--placement=block").argv
    unplaced = planned("sbatch", "-N", "4", "--placement=any")
    assert not any(word.startswith(("--switches", "--segment", "--placement")) for word in unplaced.argv)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--placement=rack"], "leaf switches or blocks"),
        (["--placement"], "needs a value"),
        (["--placement=near", "--switches=2"], "cannot be combined with --switches"),
        (["--placement=block", "--nodes=2-4"], "needs a fixed number of nodes"),
    ],
)
def test_a_placement_that_slurm_cannot_give_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse(["sbatch", "-N", "4", *words])


TREE = """echo 'SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-4]'
echo 'SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[5-10]'
echo 'SwitchName=core Level=1 LinkSpeed=1 Nodes=n[1-10] Switches=leaf[1-2]'"""


@pytest.mark.parametrize(("nodes", "switches"), [(6, 1), (7, 2), (10, 2), (11, 1)])
def test_near_nodes_take_the_fewest_switches_that_hold_them(nodes: int, switches: int, tmp_path: Path) -> None:
    argv = ("sbatch", "--switches=1@00:05:00", "job.sh")
    fitted = fit_to_cluster(argv, "near", nodes, tool(tmp_path / "bin", "scontrol", TREE), lambda line: None)
    assert fitted == ("sbatch", f"--switches={switches}@00:05:00", "job.sh")


def test_a_cluster_without_switches_places_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    environ = tool(tmp_path / "bin", "scontrol", "true")
    assert fit_to_cluster(("srun", "--switches=1@00:05:00", "x"), "near", 4, environ, said.append) == ("srun", "x")
    assert "--placement near changes nothing" in said[0]
    with pytest.raises(UsageError, match="no switches that Slurm knows"):
        fit_to_cluster(("srun", "--switches=1@365-00:00:00", "x"), "leaf", 4, environ, said.append)


def test_a_leaf_must_be_large_enough_and_a_step_is_placed_with_its_job(tmp_path: Path) -> None:
    environ = tool(tmp_path / "bin", "scontrol", TREE)
    with pytest.raises(UsageError, match="the largest leaf has 6 nodes, 7 are asked for"):
        fit_to_cluster(("sbatch", "--switches=1@365-00:00:00"), "leaf", 7, environ, lambda line: None)
    with pytest.raises(UsageError, match="the nodes of this job are chosen already"):
        fit_to_cluster(("srun",), "near", 2, {**environ, "SLURM_JOB_ID": "1"}, lambda line: None)


def test_spare_nodes_are_allocated_and_not_used() -> None:
    text = script_of(planned("sbatch", "-N4", "--spare-nodes=2"))
    assert "#SBATCH --nodes=6 --no-kill " in text
    assert " --num-nodes=4 " in text
    assert "#SBATCH -N4" not in text


@pytest.mark.parametrize(
    ("words", "signal"),
    [
        ("-t 72:00:00", "B:USR1@600"),
        ("--time=30", "B:USR1@300"),
        ("--time=5", "B:USR1@60"),
        ("--time=1", "B:USR1@30"),
        ("--requeue", "B:USR1@600"),
        ("-t 1-0 --signal=USR2@5", "USR2@5"),
        ("-N 2", None),
    ],
)
def test_the_end_is_announced_where_it_is_known_to_come(words: str, signal: str | None) -> None:
    found = re.findall(r"^#SBATCH.* --signal=(\S+)", script_of(planned("sbatch", *words.split())), re.MULTILINE)
    assert found == ([signal] if signal else [])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10", 600), ("10:30", 630), ("1:00:00", 3600), ("2-3", 183600), ("2-03:04", 183840), ("1-0:0:5", 86405),
        ("UNLIMITED", None), ("0", None), ("x", None), ("", None),
    ],
)  # fmt: skip
def test_time_limits_are_read_as_sbatch_does(text: str, seconds: int | None) -> None:
    assert limit_s(text) == seconds


@pytest.mark.parametrize("count", ["2", "2-4", "1k", "1-2M", "1,3,5-7", "1-9:2"])
def test_every_count_of_nodes_that_slurm_reads_is_accepted(count: str) -> None:
    assert parse(["sbatch", "-N", count]).slurm == ("-N", count)


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        ("scancel 3", "slurm: unsupported command 'scancel' (use srun", "use primus-cli direct -- jobs cancel"),
        ("3", "srun: '3' is not an option", "write the task"),
        ("sbath -N 2", "unknown Slurm command 'sbath'", "did you mean 'sbatch'?"),
        ("sbatch -N 2 bash", "sbatch: 'bash' after -N 2 is not an option", "write the task"),
        ("sbatch partition=x", "sbatch: 'partition=x' is not an option", "did you mean '--partition'?"),
        ("-N 2 --exclusive 7xyz", "srun: '7xyz' after --exclusive is not an option", "write the task"),
        ("sbatch -N", "sbatch: -N needs a value", ""),
        ("sbatch --max-restarts", "runtime 'slurm': --max-restarts needs a number", ""),
        ("sbatch --max-restarts=-1", "runtime 'slurm': --max-restarts -1: not a number from 0", ""),
        ("sbatch --wait=5", "sbatch: --wait takes no value", ""),
        ("srun --array=0-3", "slurm srun does not support --array", "use slurm sbatch"),
        ("sbatch -a 0-3 --spare-nodes 1", "slurm: --array cannot be combined with --max-restarts", "remove them"),
        ("sbatch --wrap hostname", "slurm: --wrap cannot be used here", "write the task after"),
        ("sbatch -n 16 -N 2", "slurm: Slurm starts one launcher on each node", "remove --ntasks"),
        ("sbatch --ntasks-per-node 8", "slurm: Slurm starts one launcher on each node", "remove --ntasks"),
        ("srun -N all", "slurm: --nodes all: not a number of nodes", "such as -N 2"),
        ("sbatch --nodes=2+1", "slurm: --nodes 2+1: not a number of nodes", "such as -N 2"),
        ("sbatch --nodes=-2", "slurm: --nodes -2: not a number of nodes", "such as -N 2"),
        ("srun --requeue", "slurm srun does not support --requeue", "use slurm sbatch"),
        ("srun --follow", "slurm srun does not support --follow", "use slurm sbatch"),
        ("sbatch -N 2-4 --spare-nodes 1", "slurm: --spare-nodes needs a fixed number of nodes", "such as -N 4"),
        ("sbatch --requeue --no-requeue", "slurm: --requeue and --no-requeue cannot be combined", ""),
        ("sbatch --export=ALL,MY_TOKEN=canary", "slurm: --export: the value of MY_TOKEN would be", "set MY_TOKEN"),
    ],
)  # fmt: skip
def test_a_word_that_cannot_be_right_is_refused(words: str, problem: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words.split())
    assert caught.value.problem.startswith(problem)
    assert caught.value.hint.startswith(hint)
    assert "canary" not in str(caught.value)


def test_ours_are_taken_out_and_the_rest_stays_as_typed() -> None:
    words = "sbatch --follow -N 2 --wait --max-restarts=3 -p x --requeue -W --site-option value --hold -vv".split()
    options = parse(words)
    assert options.slurm == tuple("-N 2 -p x --requeue --site-option value --hold -vv".split())
    assert (options.follow, options.wait, options.requeue, options.max_restarts) == (True, True, True, 3)
    assert parse(["srun", "--wait", "5"]).slurm == ("--wait", "5")


@pytest.mark.parametrize("words", ["-N 3", "-N3", "--nodes 3", "--nodes=3", "-N 2 --nodes=3"])
def test_an_option_is_known_in_each_of_its_forms(words: str) -> None:
    assert find_num_nodes(parse(words.split()).slurm_options) == 3


def test_an_option_may_be_shortened_as_slurm_allows() -> None:
    assert find_option_value(parse(["--job-n=x"]).slurm_options, "job-name") == "x"
    assert find_option_value(parse(["--node=3"]).slurm_options, "nodes") is None, "nodelist and nodefile begin so too"


def test_the_value_of_an_option_may_look_like_one() -> None:
    assert find_option_value(parse(["--comment", "--follow"]).slurm_options, "comment") == "--follow"


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
options = st.one_of(
    st.tuples(st.sampled_from(["--comment", "-J", "--constraint", "-x"]), texts),
    texts.map(lambda text: (f"--job-name={text}",)),
    st.sampled_from([("--hold",), ("-N", "2"), ("--exclusive",), ("-v",)]),
)


@given(st.sampled_from(["srun", "sbatch"]), st.lists(options, max_size=5))
def test_slurms_own_words_pass_through_unchanged(command: str, typed: list[tuple[str, ...]]) -> None:
    words = [word for option in typed for word in option]
    parsed = parse([command, *words])
    assert list(parsed.slurm) == words
    assert [each.words for each in parsed.slurm_options] == typed


@given(st.lists(st.one_of(texts, st.sampled_from(["-N", "--nodes", "--wait", "--max-restarts", "-W", "--", "-"]))))
def test_any_words_are_options_or_one_message(words: list[str]) -> None:
    try:
        parsed = parse(words)
    except UsageError:
        return
    assert parsed.command in ("srun", "sbatch")


OUTSIDE = {"PATH": "/bin", "SBATCH_ACCOUNT": "me", "SLURM_CONF": "/c", "NODE_RANK": "1", "PMIX_RANK": "0"}
INSIDE = OUTSIDE | {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "1", "SRUN_CPUS_PER_TASK": "2", "SLURMD_NODENAME": "n1"}


@pytest.mark.parametrize(
    ("environ", "command", "kept"),
    [
        (OUTSIDE, "sbatch", {"PATH", "SBATCH_ACCOUNT", "SLURM_CONF"}),
        (INSIDE, "sbatch", {"PATH", "SLURM_CONF"}),
        (INSIDE, "srun", set(INSIDE) - {"NODE_RANK", "PMIX_RANK"}),
    ],
)
def test_nothing_of_a_job_around_us_leaks_into_a_new_one(environ: dict[str, str], command: str, kept: set[str]) -> None:
    assert set(build_command_environment(environ, command, set())) == kept


def test_variables_of_the_plan_stay_whatever_their_names() -> None:
    assert (
        build_command_environment({"NODE_RANK": "1", "SLURM_X": "2"} | INSIDE, "sbatch", {"SLURM_X"})["SLURM_X"] == "2"
    )


def test_a_plan_shows_how_often_the_job_restarts() -> None:
    def policy(*words: str) -> Any:
        return planned("sbatch", *words).policy

    assert policy("--max-restarts", "4", "--restart-delay", "5").max_restarts == 4
    assert policy("--spare-nodes", "2").max_restarts == 2
    assert policy().max_restarts == 0
