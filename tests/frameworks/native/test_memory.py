"""Freed memory stays with the process, and a shortage of it is explained by its parts and what would fit."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from primus.config.extended_files import load_model
from primus.config.schema import Trainer, TrainingConfig
from primus.errors import PrimusError
from primus.frameworks.native.engine import memory_need
from primus.frameworks.native.engine.loss import cross_entropy
from primus.frameworks.native.engine.memory_need import GIB, estimate_need, explain_shortage
from primus.session.ranks.engine_errors import explain_torch_errors

PROGRAM = """
import resource, torch
from primus.frameworks.native.engine.memory import keep_freed_memory
{call}
def faults():
    for _ in range(20):
        torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_large_blocks_are_reused_without_new_page_faults() -> None:
    """64 MiB twenty times over are at least 20 x 32 faults even with pages of 2 MiB, unless they are reused."""
    returned, kept = (page_faults(call) for call in ("", "assert keep_freed_memory()"))
    assert kept < 200 < returned


def page_faults(call: str) -> int:
    program = [sys.executable, "-c", PROGRAM.format(call=call)]
    return int(subprocess.run(program, check=True, capture_output=True, text=True, timeout=60).stdout)


def describe(model: str, **training: object) -> Trainer:
    return Trainer(model=load_model(model), training=TrainingConfig(**training))  # type: ignore[arg-type]


class FullDevice(torch.Tensor):
    """A tensor on whose device nothing can be allocated."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.flatten:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return super().__torch_function__(func, types, args, kwargs)


def run_out_of_memory(trainer: Trainer, limit_gib: float, monkeypatch: pytest.MonkeyPatch) -> PrimusError:
    monkeypatch.setattr(memory_need, "_read_limit", lambda device: limit_gib * GIB)

    def explain(error: BaseException) -> tuple[str, str]:
        return explain_shortage(error, trainer, 8, torch.device("cuda"))

    hidden = torch.zeros(2, 4).as_subclass(FullDevice)
    with pytest.raises(PrimusError) as raised, explain_torch_errors(explain):
        cross_entropy(hidden, torch.zeros(8, 4), torch.zeros(2, dtype=torch.int64))
    return raised.value


def test_a_full_device_is_explained_by_its_parts_and_three_settings_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = describe("llama3.1_8B", seq_length=8192, micro_batch_size=2)
    error = run_out_of_memory(trainer, 90, monkeypatch)
    assert error.problem.startswith("out of memory in the output head and its loss; a step needs about ")
    assert "of 90 GiB for each process: CUDA out of memory. Tried to allocate 20.00 GiB." in error.problem
    named = [text.split(": ")[0] for text in str(error.hint).partition("estimate: ")[2].split("; ")]
    assert named == ["micro_batch_size", "recompute_activations", "seq_length"]
    assert "no single setting fits" in str(run_out_of_memory(trainer, 8, monkeypatch).hint)


def test_what_the_estimate_lacks_is_not_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 500 GiB everything would fit: others have taken the memory, and only a much smaller step may fit."""
    trainer = describe("llama3.1_8B", seq_length=8192)
    need = sum(estimate_need(trainer, 8, "cuda")) / GIB
    hint = str(run_out_of_memory(trainer, 500, monkeypatch).hint)
    saved = need - float(hint.partition("recompute_activations: true (")[2].split()[0])
    assert saved > 0.05 * 500


def test_parts_grow_as_they_do_in_a_step() -> None:
    one, two = (estimate_need(describe("llama3.1_8B", seq_length=n), 8, "cuda") for n in (4096, 8192))
    assert two.activations == pytest.approx(2 * one.activations, rel=0.15) and two[:3] == one[:3]
    recomputed = estimate_need(describe("llama3.1_8B", seq_length=8192, recompute_activations=True), 8, "cuda")
    assert recomputed.activations < 0.3 * two.activations
    # torchtitan's Llama 3.1 8B at sequence 8192 on 8 devices has 24 GiB of weights, gradients and states in fp32.
    assert sum(two[:3]) / GIB == pytest.approx(8.03e9 * 16 / 8 / GIB, rel=0.01)


@pytest.mark.skipif(platform.system() != "Linux", reason="the resident set is Linux's")
def test_the_estimate_of_a_step_is_near_what_a_process_takes() -> None:
    program = [sys.executable, "-c", STEP]
    measured, estimated = map(
        float, subprocess.run(program, check=True, capture_output=True, text=True, timeout=120).stdout.split()
    )
    assert estimated == pytest.approx(measured, rel=0.35)


STEP = """
import torch
from primus.config.schema import *
from primus.frameworks.native.engine.memory_need import estimate_need
from primus.frameworks.native.engine.model import build_model
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.engine.step import prepare_model, train_step
spec = ModelSpec(num_layers=4, hidden_size=256, ffn_hidden_size=512, num_attention_heads=4, vocab_size=512)
trainer = Trainer(model=spec, training=TrainingConfig(seq_length=512, micro_batch_size=16, bf16=False))
need = sum(estimate_need(trainer, 1, "cpu"))
def read_peak_kib():  # ru_maxrss of a process begins with that of its parent
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
before = read_peak_kib()
trainable = prepare_model(build_model(spec, "cpu", 0), device="cpu")
optimizer = build_optimizer(trainable.model, OptimizerConfig())
batch = (torch.zeros(16, 512, dtype=torch.int64),) * 2
train_step(trainable, optimizer, [batch], learning_rate=1e-3, clip_grad=1.0)
print((read_peak_kib() - before) * 1024, need)
"""
