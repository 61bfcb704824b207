"""Checks of what every engine shares, on the control plane: no tensor library is imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from primus.config.schema import Experiment, Trainer
from primus.engine_keys import check_key_rules, read_key_rules
from primus.errors import PrimusError, UsageError

if TYPE_CHECKING:
    from primus.checkpoint.manifest import CheckpointManifest


def check_session(trainer: Trainer, backend: str) -> None:
    """Check callbacks, observers, profile, and that the checkpoint of `load:` exists and fits; every `check` calls it.

    Raises:
        UsageError: The steps of the profile are not valid, a callback does not exist, or the checkpoint cannot be
            loaded; names the key.
    """
    if trainer.checkpoint.load is not None:
        _check_load(trainer.checkpoint.load, trainer, backend)
    if trainer.logging.profile:
        from primus.session.profile.profile_window import find_profile_window  # not for experiments without a profile

        find_profile_window(trainer)
    if trainer.training.callbacks:
        from primus.callback import CALLBACKS  # not for experiments without callbacks
        from primus.plug_in_choice import choose_plug_ins

        choose_plug_ins(CALLBACKS, trainer.training.callbacks)
    if trainer.logging.observers:
        from primus.observer import OBSERVERS
        from primus.plug_in_choice import choose_plug_ins

        choose_plug_ins(OBSERVERS, trainer.logging.observers)


def check_engine(experiment: Experiment, folder: Path) -> None:
    """Check an experiment for the engine of a framework's folder, which has no settings besides our keys.

    Raises:
        UsageError: It asks for something that is not supported; names the key and the fix.
    """
    trainer, engine = experiment.trainer, folder.name
    check_key_rules(engine, read_key_rules(folder), trainer)
    check_no_backend_args(trainer, engine)
    check_session(trainer, engine)


def check_no_backend_args(trainer: Trainer, backend: str) -> None:
    """Refuse settings for an engine that takes none.

    Raises:
        UsageError: There are some.
    """
    if trainer.backend_args:
        names = ", ".join(sorted(trainer.backend_args))
        raise UsageError(f"backend_args: {backend} takes no backend arguments, found {names}", "remove them")


def _check_load(load: str, trainer: Trainer, backend: str) -> None:
    """Check that the checkpoint of `load:` exists and fits the model; reads its manifest, not its weights."""
    from primus.checkpoint import folders  # not for experiments that load no checkpoint
    from primus.checkpoint.formats.open import check_foreign
    from primus.checkpoint.shape import build_shape, check_same_shape
    from primus.session.checkpoints.other_optimizers import check_backend_of
    from primus.session.checkpoints.remote import is_remote

    if folders.is_foreign(load):
        # Only config.json is read: other files need a tensor library, and are checked when they are opened.
        check_foreign(load, build_shape(trainer.model))
        return
    if is_remote(load):
        return  # the shape is compared when it is downloaded
    for folder in folders.find_candidates(load):
        saved = _read_manifest(folder)
        if saved is None:
            continue  # damaged: training skips it, too
        check_same_shape(saved.model, build_shape(trainer.model), str(folder))
        check_backend_of(saved, folder, backend, trainer.checkpoint.finetune)
        return
    raise UsageError(f"load: every checkpoint of {load} is damaged", "load another one")


def _read_manifest(folder: Path) -> CheckpointManifest | None:
    from primus.checkpoint import manifest

    try:
        return manifest.read_manifest(folder)
    except PrimusError:
        return None
