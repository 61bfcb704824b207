"""The numbers of a step that follow from its time: rates, MFU and memory."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from primus.callback import StepReport

GIB = 1 << 30
KIB = 1 << 10


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Factors that convert the time of a step into rates."""

    global_batch_size: int
    tokens: int
    """Of a global batch."""
    world: int
    """Number of devices that share the batch."""
    flops_per_token: float
    peak_tflops: float | None
    """Of one device in the training precision; None if it is not known."""

    def build_report(
        self,
        *,
        step: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        consumed_samples: int,
        step_time_s: float,
        data_time_s: float,
        compute_time_s: float | None,
        cpu_time_s: float,
        memory_bytes: int,
        skipped: bool,
        spike: bool = False,
    ) -> StepReport:
        per_device = self.tokens / step_time_s / self.world
        tflops = per_device * self.flops_per_token / 1e12
        return StepReport(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            tokens=self.tokens,
            consumed_samples=consumed_samples,
            global_batch_size=self.global_batch_size,
            step_time_s=step_time_s,
            data_time_s=data_time_s,
            tokens_per_s=self.tokens / step_time_s,
            tokens_per_s_per_device=per_device,
            tflops_per_device=tflops,
            mfu=tflops / self.peak_tflops if self.peak_tflops else None,
            memory_gib=memory_bytes / GIB,
            skipped=skipped,
            spike=spike,
            compute_time_s=compute_time_s,
            cpu_time_s=cpu_time_s,
        )


def read_peak_host_memory() -> int:
    """Peak resident memory of this process in bytes; ru_maxrss is in KiB on Linux (getrusage(2))."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
