"""Metrics of a run as Prometheus gets them: by its own parser, by a real server, and by the textfile collector."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from fakes import cli
from fakes.cli import find_free_port, wait_for
from observers.conftest import ObservedFolder
from primus.errors import PrimusError, UnfitError

parser = pytest.importorskip("prometheus_client.parser")
ROOT = Path(__file__).parents[2]
NAMES = {"experiment": "night", "run": "20260101_120000-ab12"}


def scrape(observed: ObservedFolder) -> dict[str, float]:
    """The samples of the endpoint, which all belong to the run."""
    return parse(fetch(find_url(observed)))


def find_url(observed: ObservedFolder) -> str:
    found = next(re.search(r"http://[^:]+:(\d+)/metrics", text) for text in observed.said)
    assert found is not None
    return f"http://127.0.0.1:{found[1]}/metrics"


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def parse(text: str) -> dict[str, float]:
    samples = [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.labels.items() >= NAMES.items() for sample in samples)
    return {sample.name: sample.value for sample in samples}


def test_a_scrape_has_the_numbers_of_the_newest_step_and_what_happened(observed: ObservedFolder) -> None:
    observed.observe([{"prometheus": {"port": find_free_port(), "address": "127.0.0.1"}}])
    assert scrape(observed)["primus_run_info"] == 1 and "primus_step" not in scrape(observed)
    observed.start()
    for number in (1, 2):
        observed.step(number)
    observed.append("eval", step=2, loss=7.5)
    observed.append("checkpoint_saved", step=2)
    observed.append("hang", rank=1)
    observed.append("restart", attempt=1)
    wait_for(lambda: scrape(observed).get("primus_restarts_total") == 1, "the restart")
    found = scrape(observed)
    expected = {
        "primus_step": 2, "primus_train_iters": 300, "primus_loss": 7.75, "primus_validation_loss": 7.5,
        "primus_step_time_seconds": 0.25, "primus_tokens_per_second": 32768, "primus_mfu_ratio": 0.4,
        "primus_memory_bytes": 1.5 * 2**30, "primus_hangs_total": 1, "primus_tokens_total": 16384,
        "primus_checkpoint_step": 2, "primus_healthy": 0,
    }  # fmt: skip
    assert found.items() >= expected.items()
    observed.step(3, loss=None, mfu=None)
    wait_for(lambda: scrape(observed)["primus_step"] == 3, "step 3")
    after = scrape(observed)
    assert after["primus_loss"] != after["primus_loss"], "NaN"
    assert after["primus_healthy"] == 1 and "primus_mfu_ratio" not in after


def test_a_port_in_use_gives_the_next_one_and_all_in_use_do_not_stop_the_run(observed: ObservedFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        observed.observe([{"prometheus": {"port": port, "address": "127.0.0.1"}}])
        assert f"(port {port} is in use)" in observed.said[0]
        assert scrape(observed)["primus_run_info"] == 1
    with socket.create_server(("127.0.0.1", 65535)):
        observed.said.clear()
        observed.observe([{"prometheus": {"port": 65535, "address": "127.0.0.1"}}])
        assert "no metrics for Prometheus" in observed.said[0] and "the run goes on" in observed.said[0]


def test_an_address_of_another_host_is_an_error_before_the_run(observed: ObservedFolder) -> None:
    with pytest.raises(PrimusError, match=r"192\.0\.2\.1:9464 cannot be used"):
        observed.observe([{"prometheus": {"address": "192.0.2.1"}}])


def test_a_missing_package_ends_the_run_before_it_starts(
    observed: ObservedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, package in (("prometheus", "prometheus_client"), ("opentelemetry", "opentelemetry.sdk.metrics")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UnfitError, match=f"{name} needs the package") as caught:
            observed.observe([name])
        assert "setup --with " in caught.value.hint


def test_the_endpoint_is_gone_with_the_run_and_recorded_among_its_events(observed: ObservedFolder) -> None:
    observed.observe([{"prometheus": {"port": find_free_port(), "address": "127.0.0.1"}}])
    url = find_url(observed)
    assert '"kind":"metrics_endpoint"' in observed.run.events.read_text()
    observed.close()
    with pytest.raises(OSError):
        fetch(url)


def test_the_textfile_is_whole_at_any_time_and_removed_at_the_end(observed: ObservedFolder, tmp_path: Path) -> None:
    observed.observe([{"prometheus": {"textfile": str(tmp_path)}}])
    (file,) = tmp_path.glob("*.prom")
    observed.start()
    observed.step(1)
    wait_for(lambda: parse(file.read_text()).get("primus_step") == 1, "step 1")
    assert observed.said == [], "there is no endpoint"
    observed.close()
    assert not file.exists()


@pytest.mark.cluster("prometheus")
def test_a_real_prometheus_answers_every_question_of_the_dashboard(observed: ObservedFolder, tmp_path: Path) -> None:
    observed.observe([{"prometheus": {"port": find_free_port(), "address": "127.0.0.1"}}])
    observed.start()
    observed.step(1)
    observed.append("eval", step=1, loss=7.5)
    port = find_free_port()
    target = urllib.parse.urlsplit(find_url(observed)).netloc
    jobs = f"scrape_configs: [{{job_name: primus, static_configs: [{{targets: ['{target}']}}]}}]"
    (tmp_path / "prometheus.yml").write_text(f"global: {{scrape_interval: 1s, scrape_timeout: 1s}}\n{jobs}\n")
    words = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    words.append(f"--web.listen-address=127.0.0.1:{port}")

    def ask(question: str) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode({"query": question})
        try:
            return json.loads(fetch(f"http://127.0.0.1:{port}/api/v1/query?{query}"))["data"]["result"]  # type: ignore[no-any-return]
        except OSError:
            return []  # it starts

    with open(tmp_path / "log", "w") as log, subprocess.Popen(["prometheus", *words], stdout=log, stderr=log) as server:
        try:
            wait_for(lambda: ask("primus_step"), "the first scrape")
            dashboard = json.loads((ROOT / "examples/monitoring/grafana-dashboard.json").read_text())
            for panel in dashboard["panels"]:
                for each in panel["targets"]:
                    question = each["expr"].replace("$experiment", ".*").replace("$run", ".*")
                    wait_for(lambda question=question: ask(question), question)  # type: ignore[misc]
            (loss,) = ask("primus_loss")
            assert loss["value"][1] == "8" and loss["metric"].items() >= NAMES.items()
        finally:
            server.terminate()


@pytest.mark.cluster("prometheus")
def test_promtool_accepts_the_files_of_examples_and_the_text_of_a_scrape(observed: ObservedFolder) -> None:
    observed.observe([{"prometheus": {"port": find_free_port(), "address": "127.0.0.1"}}])
    observed.start()
    observed.step(1)
    wait_for(lambda: "primus_step" in scrape(observed), "step 1")
    text = fetch(find_url(observed))
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    config = ROOT / "examples/monitoring/prometheus.yml"
    subprocess.run(["promtool", "check", "config", str(config)], check=True, capture_output=True, timeout=60)


def test_a_run_is_scraped_while_it_trains(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(
        "exp_name: night\nmodules: {pre_trainer: {framework: abacus, model: tiny.yaml, overrides: "
        "{mock_data: true, seq_length: 128, train_iters: 4, observers: [{prometheus: {address: 127.0.0.1}}]}}}\n"
    )
    done = cli.run("direct", "--single", "--", "train", "pretrain", "--config", "e.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "metrics for Prometheus: http://" in done.stdout
