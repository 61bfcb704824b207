"""`tune gemm` tunes each logged shape once, resumes, and reads old and new files; hipblaslt-bench is a script."""

from __future__ import annotations

import json
import shlex
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from primus.cli.main import main
from primus.errors import PrimusError
from primus.runs import lock
from primus.tuning.gemm import hipblaslt
from primus.tuning.search.claim import claim_host, claim_work

BENCH = """\
#!/bin/sh
echo "$HIP_VISIBLE_DEVICES $*" >> "$CALLS"
case "$*" in *" -m 13 "*) echo "error: no solution" >&2; exit 1;; esac
case "$*" in *" -m 14 "*) exit 0;; esac
m=0; bias=0
while [ $# -gt 0 ]; do [ "$1" = -m ] && m=$2; [ "$1" = --bias_vector ] && bias=1; shift; done
if [ "$COLUMNS_OF" = old ]; then
  header=transA,transB,batch_count,m,n,k,hipblaslt-Gflops,us,soulution_index; line=T,N,1,$m,512,1024,100,33.5,4$m
else
  header=transA,transB,grouped_gemm,batch_count,m,n,k,bias_vector,hipblaslt-Gflops,us,solution_index,gcnArchName,CUs
  line=T,N,0,1,$m,512,1024,$bias,100,33.5,4$m,gfx950:sramecc+:xnack-,256
fi
printf 'Git Version: %s\\n    %s\\n    %s\\n' "$LIBRARY" "$header" "$line" > "$HIPBLASLT_TUNING_FILE"
"""
LINE = (
    "hipblaslt-bench --api_method c -m {m} -n 512 -k 1024 --transA T --transB N {extra}--a_type bf16_r"
    " --algo_method index --solution_index 56073"
)
WORDS = "gemm --shapes dump_1.txt dump_2.txt --output tuned.txt --gpus 0 1 --bench ./hipblaslt-bench --json"


@pytest.fixture(autouse=True)
def prepare_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bench = tmp_path / "hipblaslt-bench"
    bench.write_text(BENCH)
    bench.chmod(0o755)
    for name, value in {"CALLS": str(tmp_path / "calls"), "LIBRARY": "fa9cdd18", "COLUMNS_OF": "new"}.items():
        monkeypatch.setenv(name, value)
    write_log("dump_1.txt", 2048, 1024, 2048)
    (tmp_path / "dump_2.txt").write_text(
        "[2026] other line\n" + LINE.format(m=2048, extra="--bias_vector ") + "\nhipblaslt-bench --api_method c -m 20"
    )


def write_log(name: str, *sizes: int) -> None:
    Path(name).write_text("".join(LINE.format(m=m, extra="") + "\n" for m in sizes))


def call_tune(words: str) -> int:
    return main(["direct", "--", "tune", *shlex.split(words)])


def read_result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert call_tune(WORDS) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def read_calls() -> list[str]:
    return Path("calls").read_text().splitlines() if Path("calls").exists() else []


def test_each_shape_is_tuned_once_without_its_old_solution(capsys: pytest.CaptureFixture[str]) -> None:
    result = read_result(capsys)
    assert (result["num_shapes"], result["num_tuned"], result["share_of_calls"]) == (3, 3, 1.0)
    calls = read_calls()
    assert len(calls) == 3 and sum("--bias_vector --a_type" in call for call in calls) == 1
    assert all("solution_index" not in call and "algo_method" not in call for call in calls)
    assert all("--requested_solution -1 --skip_slow_solution_ratio 0.7" in call for call in calls)
    written = hipblaslt.parse_tuning_file(Path("tuned.txt").read_text(), "tuned.txt")
    assert written.version == "fa9cdd18"
    assert sorted(entry.values["solution_index"] for entry in written.entries) == ["41024", "42048", "42048"]


def test_an_interrupted_search_tunes_only_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    first = read_result(capsys)
    parts = sorted(Path("tuned.txt.parts").glob("*.txt"))
    parts[0].write_text(parts[0].read_text()[:60])
    parts[1].unlink()
    Path("calls").unlink()
    assert read_result(capsys) == first
    assert len(read_calls()) == 2


def test_parts_of_another_library_are_tuned_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_result(capsys)
    write_log("dump_1.txt", 2048, 1024, 4096)
    monkeypatch.setenv("LIBRARY", "0badcafe")
    Path("calls").unlink()
    assert read_result(capsys)["version"] == "0badcafe"
    assert len(read_calls()) == 4
    assert "fa9cdd18" not in Path("tuned.txt").read_text()


def test_the_columns_of_older_versions_are_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS_OF", "old")
    assert {shape["solution"] for shape in read_result(capsys)["shapes"]} == {"41024", "42048"}


def test_a_file_without_a_version_is_read_if_its_solutions_have_names() -> None:
    row = "transA,m,solution_index,kernel_name\nT,64,7,Cijk_x\n"
    found = hipblaslt.parse_tuning_file(row, "tuned.txt")
    assert (found.version, [entry.values["kernel_name"] for entry in found.entries]) == ("", ["Cijk_x"])
    assert hipblaslt.parse_tuning_file(hipblaslt.format_tuning_file("", found.entries), "x") == found
    with pytest.raises(PrimusError, match="without the values of a problem"):
        hipblaslt.parse_tuning_file(f"Git Version: a\n{row}{row.splitlines()[0]}\n", "cut off after a header")
    for text in ("transA,m,solution_index\nT,64,7\n", row.splitlines()[0], ""):
        with pytest.raises(PrimusError, match=r"not a tuning file|damaged"):
            hipblaslt.parse_tuning_file(text, "tuned.txt")


def test_shapes_that_fail_are_named_and_the_others_are_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    write_log("dump_1.txt", 13, 14, 2048)
    result = read_result(capsys)
    assert {shape.split(" x ")[0]: reason for shape, reason in result["failures"].items()} == {
        "13": "error: no solution",
        "14": "./hipblaslt-bench wrote no tuning file",
    }
    assert result["num_tuned"] == 2 and result["share_of_calls"] == 0.5


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("gemm --shapes none.txt --gpus 0", 1, "none.txt: cannot be read"),
        ("gemm --shapes hipblaslt-bench --gpus 0", 1, "HIPBLASLT_LOG_MASK=32"),
        ("gemm --shapes dump_1.txt --gpus 0 --bench no-such-bench", 3, "no-such-bench is not installed"),
        ("gemm --gpus 0", 2, "tune gemm needs --config FILE"),
    ],
)
def test_bad_input_is_one_message(words: str, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call_tune(words) == code
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_two_searches_into_one_file_are_refused_on_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    with claim_host(Path("tuned.txt.parts")):
        assert call_tune(WORDS) == 2
    assert "is used by process" in capsys.readouterr().err
    assert not read_calls()


def test_a_shape_that_another_node_tunes_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    first = read_result(capsys)
    part = sorted(Path("tuned.txt.parts").glob("*.txt"))[0]
    text = part.read_text()
    part.unlink()
    Path("calls").unlink()
    claimed = threading.Event()

    def finish_as_other_node() -> None:
        (host,) = Path("tuned.txt.parts/hosts").iterdir()
        with claim_work(Path("tuned.txt.parts/claims") / part.stem):
            claimed.set()
            deadline = time.monotonic() + 60
            while lock.find_holder(host) is None and time.monotonic() < deadline:
                time.sleep(0.01)
            part.write_text(text)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(finish_as_other_node)
        assert claimed.wait(60)
        assert read_result(capsys) == first
        other.result()
    assert not read_calls(), "the shape was tuned on the other node"
