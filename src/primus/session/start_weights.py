"""The weights that a run starts from, in hub names."""

from __future__ import annotations

import hashlib
import math
import zlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from primus.checkpoint.weights import WeightReader
    from primus.config.schema import ModelSpec, Trainer
    from primus.session.session import Session

MOST_ELEMENTS = 1 << 30
"""Elements whose values count in a fingerprint: a minute of drawing and hashing. The rest counts by name and shape."""


class WeightsFingerprint(NamedTuple):
    """What the initial weights of a run are."""

    origin: str
    """``seed 1234``, what `load:` names, or ``engine`` if the engine draws them."""
    value: str | None
    """Equal for equal weights, whatever engine holds them; None if the engine draws them."""


def open_loaded_weights(session: Session) -> WeightReader | None:
    """The weights of `load:`, of any format and engine; None if a run begins without them.

    Raises:
        PrimusError: The checkpoint is damaged, or of another model; reading raises it for values that are not finite.
    """
    given = session.trainer.checkpoint.load if session.start is None else str(session.start.folder)
    return None if given is None else _open_given(given, session.trainer.model)


def open_base_weights(trainer: Trainer) -> WeightReader:
    """The weights under adapters: those of `load:`, or initial ones; also where a run resumes.

    Raises:
        PrimusError: The checkpoint is damaged, or of another model.
    """
    if trainer.checkpoint.load is not None:
        return _open_given(trainer.checkpoint.load, trainer.model)
    from primus.checkpoint.initial_weights import InitialWeights

    return InitialWeights(trainer.model, trainer.training.seed)


def _open_given(given: str, spec: ModelSpec) -> WeightReader:
    from primus.checkpoint.formats.huggingface import check_copies
    from primus.checkpoint.formats.open import find_checkpoint, open_weights
    from primus.checkpoint.formats.saved_shape import check_saved_shape
    from primus.checkpoint.views import FiniteWeights

    found = find_checkpoint(given)
    check_saved_shape(found, spec)
    weights = open_weights(found, spec)
    check_copies(weights, given)
    return FiniteWeights(weights, given)


def open_start_weights(session: Session) -> WeightReader | None:
    """The weights to load before the first step: those of `load:` or initial ones; None leaves them to the engine.

    Raises:
        PrimusError: The checkpoint is damaged, or of another model.
    """
    loaded = open_loaded_weights(session)
    if loaded is not None or session.trainer.training.init == "engine":
        return loaded
    from primus.checkpoint.initial_weights import InitialWeights

    return InitialWeights(session.trainer.model, session.trainer.training.seed)


def fingerprint_start_weights(session: Session) -> WeightsFingerprint:
    """The fingerprint of the weights that the engine is given before the first step."""
    if session.start is not None and not session.start.weights_only:
        return WeightsFingerprint(f"checkpoint of step {session.start.step}", None)
    weights = open_start_weights(session)
    if weights is None:
        return WeightsFingerprint("engine", None)
    origin = session.trainer.checkpoint.load or f"seed {session.trainer.training.seed}"
    return WeightsFingerprint(origin, compute_weights_fingerprint(weights))


def compute_weights_fingerprint(weights: WeightReader) -> str:
    """SHA-256 over names, shapes and float32 values; values of the first `MOST_ELEMENTS` elements by name."""
    digest, seen = hashlib.sha256(), 0
    for name, info in sorted(weights.list_tensors().items()):
        checksum = 0
        if seen <= MOST_ELEMENTS:
            seen += math.prod(info.shape)
            checksum = zlib.crc32(weights.read(name).float().contiguous().numpy().data)
        digest.update(f"{name} {list(info.shape)} {checksum}\n".encode())
    return digest.hexdigest()[:32]
