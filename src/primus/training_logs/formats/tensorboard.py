"""TensorBoard event files, read without tensorboard; the tags of each trainer have their own names.

Source: records of TFRecord (length, checksum, data, checksum) around messages of tensorflow/core/util/event.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

from primus.protobuf import read_fields
from primus.training_logs.log_step import LogStep

NAME = "tensorboard"
TITLE = "TensorBoard"
MARK = ".tfevents."
"""Part of the name of each event file."""
MAX_RECORD = 1 << 24
"""A longer record, such as an image, is skipped unread."""

TAGS = {
    # Megatron-LM, and primus itself
    "lm loss": "loss",
    "grad-norm": "grad_norm",
    "learning-rate": "learning_rate",
    "iteration-time": "step_time_s",
    "throughput": "tflops_per_device",
    "tokens-per-second-per-device": "tokens_per_s_per_device",
    "memory-gib": "memory_gib",
    "batch-size": "global_batch_size",
    # torchtitan
    "loss_metrics/global_avg_loss": "loss",
    "grad_norm": "grad_norm",
    "lr": "learning_rate",
    "throughput(tps)": "tokens_per_s_per_device",
    "tflops": "tflops_per_device",
    "mfu(%)": "mfu",
    "time_metrics/end_to_end(s)": "step_time_s",
    "memory/max_reserved(GiB)": "memory_gib",
    # NeMo
    "reduced_train_loss": "loss",
    "train_step_timing in s": "step_time_s",
    "consumed_samples": "consumed_samples",
    # MaxText
    "learning/loss": "loss",
    "learning/grad_norm": "grad_norm",
    "learning/current_learning_rate": "learning_rate",
    "perf/step_time_seconds": "step_time_s",
    "perf/per_device_tflops_per_sec": "tflops_per_device",
    "perf/per_device_tokens_per_sec": "tokens_per_s_per_device",
    # Hugging Face Trainer
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "learning_rate",
    # Composer
    "loss/train/total": "loss",
    "throughput/device/tokens_per_sec": "tokens_per_s_per_device",
    "l2_norm/grad/global": "grad_norm",
}
"""Field by tag."""
PERCENT = "(%)"
"""End of a tag whose values are percentages."""


class EventFileError(ValueError):
    """The data is not that of an event file."""


def read_event_steps(file: BinaryIO) -> Iterator[LogStep]:
    """The steps of an event file; a record that is cut off ends it.

    Raises:
        EventFileError: The file holds something else.
    """
    waiting: dict[str, float] = {}
    last_time_s = 0.0
    for time_s, step, scalars in _read_events(file):
        values = {TAGS[tag]: value / 100 if tag.endswith(PERCENT) else value for tag, value in scalars if tag in TAGS}
        if not values:
            continue
        # Each tag is an event: the values of a step follow each other.
        if waiting and waiting["step"] != step:
            yield LogStep(waiting, time_s=last_time_s)
            waiting = {}
        waiting, last_time_s = {"step": float(step), **waiting, **values}, time_s
    if waiting:
        yield LogStep(waiting, time_s=last_time_s)


def _read_events(file: BinaryIO) -> Iterator[tuple[float, int, list[tuple[str, float]]]]:
    """Time, step and scalars of each event."""
    is_first = True
    while len(header := file.read(12)) == 12:
        (length,) = struct.unpack("<Q", header[:8])
        if is_first and length > MAX_RECORD:
            raise EventFileError("not an event file of TensorBoard")
        if length > MAX_RECORD:
            file.seek(length + 4, 1)
            continue
        data = file.read(length)
        if len(data) < length or len(file.read(4)) < 4:
            return
        try:
            yield _read_event(data)
        except (ValueError, IndexError, struct.error):
            if is_first:
                raise EventFileError("not an event file of TensorBoard") from None
        is_first = False


def _read_event(data: bytes) -> tuple[float, int, list[tuple[str, float]]]:
    time_s, step = 0.0, 0
    scalars: list[tuple[str, float]] = []
    for number, value in read_fields(data):
        if number == 1 and isinstance(value, bytes):
            (time_s,) = struct.unpack("<d", value)
        elif number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            scalars += [found for kind, part in read_fields(value) if kind == 1 and (found := _read_scalar(part))]
    return time_s, step, scalars


def _read_scalar(data: bytes | int) -> tuple[str, float] | None:
    """Tag and value of a `Summary.Value`: `simple_value` of the first API, a tensor of one float of the second."""
    fields = dict(read_fields(data)) if isinstance(data, bytes) else {}
    tag, simple, tensor = fields.get(1), fields.get(2), fields.get(8)
    if not isinstance(tag, bytes):
        return None
    if isinstance(simple, bytes):
        return tag.decode(), struct.unpack("<f", simple)[0]
    if isinstance(tensor, bytes):
        parts = dict(read_fields(tensor))
        content = parts.get(4) or parts.get(5)  # tensor_content, float_val
        if parts.get(1) == 1 and isinstance(content, bytes) and len(content) == 4:  # DT_FLOAT
            return tag.decode(), struct.unpack("<f", content)[0]
    return None
