"""Types of the names that `primus` imports on their first use."""

from primus.api import CommandOutcome as CommandOutcome
from primus.api import PreparedCommand as PreparedCommand
from primus.api import RecordedRun as RecordedRun
from primus.api import RunCollection as RunCollection
from primus.api import RunningCommand as RunningCommand
from primus.api import open_run as open_run
from primus.api import open_runs as open_runs
from primus.api import prepare as prepare
from primus.errors import FinalError as FinalError
from primus.errors import PrimusError as PrimusError
from primus.errors import UnfitError as UnfitError
from primus.errors import UsageError as UsageError

__version__: str
SITE_ADDRESS: str
