"""What a run says of itself before its first step, as lines and as an event."""

from __future__ import annotations

import platform

import primus
from primus.callback import CONVENTION
from primus.models.counts import count_parameters
from primus.session.batches.batch_record import is_recorded
from primus.session.session import Session
from primus.session.start_weights import fingerprint_start_weights
from primus.session.training_run import TrainingRun


def report_setup(run: TrainingRun) -> None:
    """Print and record what is trained, on what, and how."""
    session = run.session
    trainer, engine = session.trainer, session.engine
    config = trainer.training
    num_parameters = count_parameters(trainer.model).total_parameters
    _print_setup(session, num_parameters)
    if session.compile_reason:
        run.print_line(f"torch.compile: {'on' if session.compiled else 'off'} ({session.compile_reason})")
    run.append_event(
        "run_started",
        attempt=session.attempt.number,
        step=run.step,
        backend=engine.backend,
        device=engine.device_name,
        device_type=engine.device_type,
        world_size=session.processes.world,
        threads=engine.threads,
        parameters=num_parameters,
        flops_per_token=run.timer.rates.flops_per_token,
        flops_convention=CONVENTION,
        compiled=session.compiled,
        compile_reason=session.compile_reason,
        dtype="bfloat16" if config.bf16 else "float32",
        global_batch_size=session.global_batch_size,
        seq_length=config.seq_length,
        train_iters=config.train_iters,
        data_fingerprint=session.data.fingerprint,
        versions={
            "primus": primus.__version__,
            "python": platform.python_version(),
            engine.library: engine.version,
            **engine.versions,
        },
        **_describe_start_weights(session),
    )


def _describe_start_weights(session: Session) -> dict[str, str | None]:
    """The fingerprint of the initial weights, if a record of the inputs is asked for."""
    if not is_recorded(session.environ) or not session.processes.is_first:
        return {}
    origin, value = fingerprint_start_weights(session)
    return {"weights_origin": origin, "weights_fingerprint": value}


def _print_setup(session: Session, num_parameters: int) -> None:
    """Print the size of the model, the devices, the steps, and the epochs of each corpus."""
    trainer, engine = session.trainer, session.engine
    config = trainer.training
    batch = f"{session.global_batch_size} x {config.seq_length} tokens"
    num_samples = config.train_iters * session.global_batch_size
    data = "random" if trainer.data.mock_data else f"{num_samples / session.data.train.samples_per_epoch:.2g} epochs"
    session.reporter.print_line(
        f"{num_parameters / 1e6:,.1f} M parameters in {'bf16' if config.bf16 else 'fp32'}"
        f" on {engine.num_devices} x {engine.device_name}; {config.train_iters:,} steps of {batch},"
        f" together {num_samples * config.seq_length:,} ({data})"
    )
    corpora = session.data.train.compute_progress(num_samples)
    for part in corpora if len(corpora) > 1 else ():
        session.reporter.print_line(f"  {part.prefix}: {part.samples:,} samples, {part.epochs:.2g} epochs")
