"""`benchmark` runs in workers, writes what was asked for, and compares with a baseline."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from fakes import cli
from primus import registry
from primus.benchmark import BENCHMARKS
from primus.errors import UsageError
from primus.runs.lock import START_LOCKS

EXPERIMENT = """\
modules:
  pre_trainer:
    framework: native
    model: tiny
    overrides:
      {mock_data: true, seq_length: 16, train_iters: 5, micro_batch_size: 1, global_batch_size: 1, bf16: false,
       compile: false}
"""
TINY = ("-M", "16:32:x2", "-N", "16", "-K", "8", "--quick", "--device", "cpu", "--duration", "0.2")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """One small measurement, with its folder and output."""
    folder = tmp_path_factory.mktemp("gemm")
    files = ("g.csv", "g.jsonl", "g.html")
    words = ("benchmark", "gemm", *TINY, "--dtype", "fp32", "tf32", "--output-file", *files)
    done = cli.run("direct", "--single", "--", *words, cwd=folder, timeout_s=240, XDG_STATE_HOME=str(folder / "state"))
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, done.stderr


def test_a_benchmark_prints_a_table_and_writes_every_file(measured: tuple[Path, str, str]) -> None:
    folder, out, _ = measured
    assert "TFLOP/s" in out and "tf32: not offered by cpu" in out
    rows = [json.loads(line) for line in (folder / "g.jsonl").read_text().splitlines()]
    assert [(row["M"], row["dtype"], row["value"] is None) for row in rows] == [
        (16, "fp32", False), (32, "fp32", False), (16, "tf32", True), (32, "tf32", True),
    ]  # fmt: skip
    assert "<svg" in (folder / "g.html").read_text()
    latest = folder / "output/benchmark-gemm/latest/report"
    assert json.loads((latest / "benchmark.json").read_text())["ranks"][0]["is_complete"]


def test_a_slower_row_than_the_baseline_exits_with_3(measured: tuple[Path, str, str]) -> None:
    folder = measured[0]
    rows = [json.loads(line) for line in (folder / "g.jsonl").read_text().splitlines()]
    for row in rows[:2]:
        row |= {"value": row["value"] * 1e6, "low": row["value"] * 1e6, "high": row["value"] * 1e6}
    (folder / "fast.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("benchmark", "gemm", *TINY, "--dtype", "fp32", "--baseline", "fast.jsonl", "--json")
    done = cli.run("direct", "--single", "--", *words, cwd=folder, timeout_s=240, XDG_STATE_HOME=str(folder / "state"))
    assert done.returncode == 3, done.stderr
    assert [each["is_slower"] for each in json.loads(done.stdout)["comparison"]] == [True, True]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gemm", "-M", "0"), "-M 0: a size is a positive number"),
        (("gem",), "no benchmark 'gem'"),
        (("gemm", "--output-file", "x.xlsx"), "x.xlsx: unknown format of results"),
        (("gemm", "--baseline", "none.csv"), "none.csv does not exist"),
        (("gemm", "--tolerance", "5"), "--tolerance 5: expected a share"),
        (("gemm", "--dtype", "int3"), "--dtype"),
        (("gemm", "--mm", "4"), "unknown option --mm"),
        (("rccl", "--sizes", "4Q"), "--sizes 4Q: not a size"),
        (("--output-file", "a.csv", "gemm"), "the benchmark is not named"),
        (("gemm-deepseek", "--n-routed-experts", "4"), "--num-experts-per-tok 6: more than --n-routed-experts 4"),
        (("--duration", "3", "gemm", "-K", "1:0"), "-K 1:0: the range ends before it begins"),
        (("rccl", "--trace-ops", "broadcast", "--op", "all_reduce"), "--trace-ops, --trace-sizes: not measured"),
        (("rccl", "--trace-file", "t.html"), "t.html: not a format of tables"),
        (("strided-allgather", "--sizes-mb", "0"), "--sizes-mb 0"),
        (("attention", "--backend", "flesh"), "did you mean 'flash'"),
        (("attention", "--heads", "6", "--groups", "4"), "--groups 4: does not divide --heads 6"),
        (("attention", "--models", "llama2_7B", "--skip-models", "llama2_7B"), "no shape remains"),
        (("attention", "--shapes-json-path", "none.json"), "--shapes-json-path none.json: No such file"),
        (("gemm-moe", "--model", "llama3.1_8B"), "has no experts"),
        (("storage", "--folder", "/none"), "--folder /none: not a folder"),
        (("storage", "--size-mib", "1"), "--block-kib 4096: more than the file of 1 MiB"),
        (("train",), "benchmark train needs --config"),
        (("tokenizer", "--tokenizer", "./none.json"), "--tokenizer ./none.json: does not exist"),
    ],
)
def test_a_wrong_option_gives_one_message_before_anything_starts(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = cli.run("direct", "--", "benchmark", *words, cwd=tmp_path)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("name", registry.list_plug_ins("benchmarks"))
def test_the_defaults_of_every_benchmark_are_valid(name: str) -> None:
    plug_in = registry.load_plug_in(BENCHMARKS, name)
    needed = {"train": "needs --config", "tokenizer": "needs --tokenizer"}
    if name not in needed:
        plug_in.check_options(plug_in.Options(benchmark=name))
        return
    with pytest.raises(UsageError, match=needed[name]):
        plug_in.check_options(plug_in.Options(benchmark=name))


def test_a_shape_that_does_not_fit_memory_says_how_much_it_needs(tmp_path: Path) -> None:
    words = ("benchmark", "gemm", "-M", "1000000000", "-N", "4096", "--quick", "--device", "cpu")
    done = cli.run("direct", "--single", "--", *words, cwd=tmp_path, timeout_s=240, XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "does not fit memory: " in done.stderr and "TiB needed for 2 sets of operands" in done.stderr


def test_the_list_and_the_help_name_every_benchmark(tmp_path: Path) -> None:
    out = cli.run("direct", "--", "benchmark", "list", cwd=tmp_path).stdout
    assert all(name in out for name in registry.list_plug_ins("benchmarks"))
    help_text = cli.run("direct", "--", "benchmark", "gemm", "--help", cwd=tmp_path).stdout
    assert "usage: primus-cli direct -- benchmark gemm [options]" in help_text
    assert "-M, --m, --M" in help_text and "--baseline" in help_text


def test_two_ranks_measure_collectives_of_a_small_type(tmp_path: Path) -> None:
    # AMD-AGI/Primus ignores the number of sizes, and fails on ranks other than 0 when it traces calls.
    words = ("collectives", "--min-bytes", "1K", "--max-bytes", "4K", "--num-sizes", "2", "--per-rank")
    more = ("--per-iter-trace", "--iters", "10", "--warmup", "2", "--device", "cpu", "--json")
    files = ("--output-file", "c.csv", "--trace-file", "calls.jsonl", "--trace-limit", "3", "--trace-sizes", "4K")
    repeats = ("--repeat", "2", "--aggregate-repeat", "--backend", "gloo")
    command = ("direct", "--nproc", "2", "--", "benchmark", *words, *more, *files, *repeats)
    done = cli.run(*command, cwd=tmp_path, timeout_s=240, XDG_STATE_HOME=str(tmp_path), PRIMUS_CLUSTER="lab 7")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["result"]["options"]["cluster"] == "lab 7"
    collectives = registry.load_plug_in(BENCHMARKS, "collectives")
    result = json.loads(done.stdout)["result"]
    rows = [row for rank in result["ranks"] for row in rank["rows"]]
    assert sorted({row["case"]["size_bytes"] for row in rows}) == [1024, 4096]
    for row in rows:
        assert (row["wrong"], row["problem"], row["case"]["ranks"]) == (0, "", 2)
        factor = 0.5 if row["case"]["op"] in ("all_gather", "reduce_scatter", "all_to_all") else 1
        assert row["value"] == pytest.approx(row["figures"]["algbw_gb_per_s"] * factor)
        is_single = row["case"]["repeat"] != "all"
        assert is_single == ({"rank_0_us", "rank_1_us"} <= set(row["figures"]))
        assert (is_single and row["case"]["size_bytes"] == 4096) == ("call_p99_us" in row["figures"])
    assert {row["case"]["op"] for row in rows} >= {"all_reduce", "all_gather", "broadcast", "send_recv"}
    of_one_case = [row for row in rows if row["case"]["op"] == "broadcast" and row["case"]["size_bytes"] == 1024]
    assert [row["case"]["repeat"] for row in of_one_case] == [1, 2, "all"]
    assert of_one_case[2]["timing"]["n"] == sum(row["timing"]["n"] for row in of_one_case[:2])
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    keys = [(each["op"], each["repeat"], each["rank"], each["call"]) for each in calls]
    assert keys == list(itertools.product(collectives.OPERATIONS, (1, 2), (0, 1), (0, 1, 2)))
    assert {each["size_bytes"] for each in calls} == {4096} and all(each["time_us"] > 0 for each in calls)
    by_rank = (tmp_path / "c_rank.csv").read_text().splitlines()
    assert by_rank[0].split(",")[-7:-5] == ["rank", "host"] and len(by_rank) == 1 + 2 * 2 * 2 * len(
        collectives.OPERATIONS
    )


def test_attention_and_memory_report_failures_as_rows(tmp_path: Path) -> None:
    common = ("--quick", "--device", "cpu", "--duration", "0.2", "--json")
    shape = ("--seqlen", "32", "--heads", "2", "--head-dim", "8", "--backend", "math,aiter")
    done = cli.run("direct", "--single", "--", "benchmark", "attention", *shape, *common, cwd=tmp_path, timeout_s=240)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["result"]["ranks"][0]["rows"]
    assert [(row["case"]["backend"], row["case"]["direction"], row.get("value") is None) for row in rows] == [
        ("math", "forward", False), ("math", "backward", False), ("aiter", "forward", True), ("aiter", "backward", True)
    ]  # fmt: skip
    done = cli.run(
        "direct", "--single", "--", "benchmark", "memory", "--array-mib", "1", *common, cwd=tmp_path, timeout_s=240
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["result"]["ranks"][0]["rows"]
    assert [(row["case"]["kernel"], row["wrong"]) for row in rows] == [
        (name, 0) for name in ("copy", "mul", "add", "triad", "dot")
    ]


def measure_rows(folder: Path, *words: str, **env: str) -> list[dict[str, Any]]:
    """The rows of a brief measurement by one process."""
    command = (
        "direct",
        "--single",
        "--",
        "benchmark",
        *words,
        "--quick",
        "--device",
        "cpu",
        "--duration",
        "0.1",
        "--json",
    )
    done = cli.run(*command, cwd=folder, timeout_s=240, XDG_STATE_HOME=str(folder), **env)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["result"]["ranks"][0]["rows"]
    return rows


CK_PROGRAM = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/words"
echo "[bf16|batch|bhsd] b:1, h:4/2, s:64/64, d:8/8, scale_s:0.3, bias:n, mask:t(-1:0), v:r, 0.250 ms, 1.2 TFlops"
"""


def test_attention_reads_shapes_of_primus_and_runs_programs_of_composable_kernel(tmp_path: Path) -> None:
    (tmp_path / "tile_example_fmha_fwd").write_text(CK_PROGRAM)
    (tmp_path / "tile_example_fmha_fwd").chmod(0o755)
    heads = {"num_head_q": 4, "num_head_kv": 2, "head_dim_qk": 8, "head_dim_v": 8, "causal": True}
    shapes = [{"model": name, "seqlen_q": 64, "seqlen_kv": 64, **heads} for name in ("small", "other", "skipped")]
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    words = ("--shapes-json-path", "shapes.json", "--skip-models", "skipped", "--models", "small,skipped")
    more = ("--backend", "math,ck", "--mbs-list", "1,2")
    rows = measure_rows(tmp_path, "attention", *words, *more, PATH=f"{tmp_path}:{os.environ['PATH']}")
    cases = [
        (row["case"]["model"], row["case"]["batch"], row["case"]["backend"], row["case"]["direction"]) for row in rows
    ]
    assert cases == list(itertools.product(["small"], [1, 2], ["math", "ck"], ["forward", "backward"]))
    forward, backward = rows[2:4]
    assert forward["value"] == pytest.approx(2 * 4 * 64 * 32 * 16 / 0.25e-3 / 1e12)
    assert "tile_example_fmha_bwd is not installed" in backward["problem"]
    assert "-b=1 -h=4 -h_k=2 -s=64 -d=8 -d_v=8 -prec=bf16 -v=0 -mask=t" in (tmp_path / "words").read_text()


@pytest.mark.parametrize(
    ("words", "column", "found"),
    [
        (
            ("storage", "--size-mib", "1", "--block-kib", "256"),
            "pattern",
            ["sequential_write", "sequential_read", "random_write", "random_read"],
        ),
        (("dataloader", "--seqlen", "64", "--workers", "0,1"), "workers", [0, 1]),
        (("checkpoint", "--size-mib", "1"), "direction", ["write", "read"]),
        (
            ("grouped-gemm", "--experts", "3", "--tokens", "40", "-K", "16", "-N", "24", "--skew", "1"),
            "kind",
            ["grouped", "one by one"],
        ),
    ],
)
def test_the_other_benchmarks_measure_every_case(
    tmp_path: Path, words: tuple[str, ...], column: str, found: list[object]
) -> None:
    rows = measure_rows(tmp_path, *words)
    assert [row["case"][column] for row in rows] == found
    assert all(row["value"] > 0 and not row["problem"] for row in rows)
    hidden = {path.name for path in (tmp_path / "output").glob(".*")}
    assert hidden == {path.name for path in (tmp_path / "output").glob(START_LOCKS)}


def test_the_products_of_a_layer_are_summed_by_direction(tmp_path: Path) -> None:
    shape = ("--hidden-size", "16", "--intermediate-size", "24", "--num-attention-heads", "2", "--seqlen", "8")
    more = ("--num-key-value-heads", "1", "--head-dim", "8", "--vocab-size", "40", "--dtype", "fp32")
    rows = measure_rows(tmp_path, "gemm-dense", *shape, *more)
    products = [row for row in rows if "M" in row["case"]]
    # AMD-AGI/Primus labels milliseconds as seconds: here the unit is in the name of the figure.
    total = next(row for row in rows if (row["case"]["product"], row["case"]["direction"]) == ("layer", "all"))
    assert [row["case"]["product"] for row in products[::3]] == [
        "qkv",
        "attention_out",
        "gate_up",
        "down",
        "output_head",
    ]
    assert total["flop"] == sum(row["flop"] for row in products if row["case"]["product"] != "output_head")
    seconds = sum(row["timing"]["median_s"] for row in products if row["case"]["product"] != "output_head")
    assert total["figures"]["layer_us"] == pytest.approx(seconds * 1e6)


def test_training_is_reported_after_its_warm_up() -> None:
    train = registry.load_plug_in(BENCHMARKS, "train")
    steps = [5.0, 2.0, 1.5] + [1.0, 1.01, 0.99, 1.0] * 5
    row = train.summarize_steps(steps, 4096.0, {})
    assert row.value == pytest.approx(4096.0)
    assert row.figures["warm_up_steps"] >= 3
    assert "0 steps" not in row.problem and train.summarize_steps([1.0, 1.0], 1.0, {}).value is None


@pytest.mark.native
def test_an_experiment_is_trained_on_each_engine_and_a_failing_one_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    words = ("--config", "e.yaml", "--engines", "native,nothing", "--set", "train_iters=99", "--steps", "12")
    done = cli.run(
        "direct",
        "--",
        "benchmark",
        "train",
        *words,
        "--json",
        cwd=tmp_path,
        timeout_s=240,
        XDG_STATE_HOME=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    native, missing = json.loads(done.stdout)["result"]["ranks"][0]["rows"]
    assert native["unit"] == "tokens/s" and native["interval"][0] <= native["value"] <= native["interval"][1]
    assert native["timing"]["n"] + native["figures"]["warm_up_steps"] == 12
    assert "nothing" in missing["problem"] and missing["value"] is None


def test_a_rank_that_vanishes_is_named_and_the_rows_so_far_are_kept(tmp_path: Path) -> None:
    words = ("vanish", "--quick", "--device", "cpu", "--duration", "0.1", "--json")
    done = cli.run(
        "direct", "--nproc", "2", "--", "benchmark", *words, cwd=tmp_path, timeout_s=240, XDG_STATE_HOME=str(tmp_path)
    )
    assert done.returncode not in (0, 2, 3)
    assert "no complete results of rank " in done.stderr and "1" in done.stderr
    ranks = json.loads(done.stdout)["result"]["ranks"]
    assert [len(rank["rows"]) >= 1 for rank in ranks] == [True, True]
    assert not (tmp_path / "primus/benchmarks").exists()  # incomplete results are no reference
