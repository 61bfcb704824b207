"""A run that is open, as values: what an engine is built from, and what `loop` trains with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from primus.callback import CallbackPlugIn
from primus.config.schema import Experiment, Trainer
from primus.data.training.dataset import Datasets
from primus.plug_in_choice import PlugInChoice
from primus.runs.attempt import Attempt
from primus.session.checkpoints.resume import CheckpointSearch, ResumePoint
from primus.session.checkpoints.rewind import Rewind
from primus.session.ranks.engine_info import EngineInfo
from primus.session.ranks.processes import Processes
from primus.session.reports.reporter import TrainingReporter


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run that is open: what frameworks share."""

    experiment: Experiment
    attempt: Attempt
    environ: Mapping[str, str]
    """Variables of this process."""
    processes: Processes
    engine: EngineInfo
    data: Datasets
    global_batch_size: int
    """Sequences in one optimizer step."""
    choices: Sequence[PlugInChoice[CallbackPlugIn]]
    """Callbacks that the experiment names."""
    reporter: TrainingReporter
    search: CheckpointSearch
    start: ResumePoint | None
    """Checkpoint that the run starts from; None for initial weights."""
    rewinds: Sequence[Rewind]
    """Of the attempts before this one."""
    compiled: bool
    """Whether torch.compile has changed the steps."""
    compile_reason: str = ""
    """Why; nothing is printed about it if it is empty."""

    @property
    def trainer(self) -> Trainer:
        return self.experiment.trainer

    @property
    def masked_token(self) -> int | None:
        """The token after which nothing is predicted; None if everything is."""
        return self.data.eod_id if self.trainer.data.eod_mask_loss else None
