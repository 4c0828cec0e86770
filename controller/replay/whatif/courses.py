"""Runs several independent courses of the same history in parallel, one per core."""

import gc
from collections.abc import Sequence

from controller.replay.whatif.cores import cores, helpers
from controller.replay.whatif.course import CourseTaken, CourseTerms, take
from controller.replay.whatif.recording import Recording

FORKED_FROM = 20_000  # events; a shorter recording takes less time than starting a process
_task: tuple[Recording, Sequence[CourseTerms]] | None = None  # inherited by the forked processes


def take_all(recording: Recording, terms: Sequence[CourseTerms]) -> list[CourseTaken]:
    """Replay a recording with each of these parameters. Raise HelperGone."""
    if recording.events < FORKED_FROM or cores() == 1 or len(terms) == 1:
        return [take(recording, one) for one in terms]
    global _task
    _task = recording, terms
    gc.freeze()  # keeps the children from copying memory that they only read
    try:
        with helpers(min(cores(), len(terms))) as pool:
            return list(pool.map(_take, range(len(terms))))
    finally:
        gc.unfreeze()
        _task = None


def _take(place: int) -> CourseTaken:
    assert _task is not None
    recording, terms = _task
    return take(recording, terms[place])
