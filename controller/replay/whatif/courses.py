"""Several courses of the same history: each knows nothing of the others, so every core takes one."""

import gc
from collections.abc import Sequence

from controller.replay.whatif.cores import cores, helpers
from controller.replay.whatif.course import CourseTaken, CourseTerms, take
from controller.replay.whatif.recording import Recording

FORKED_FROM = 20_000  # events: what is shorter is decided sooner than a process is there
_task: tuple[Recording, Sequence[CourseTerms]] | None = None  # as it was when the processes were forked


def take_all(recording: Recording, terms: Sequence[CourseTerms]) -> list[CourseTaken]:
    """Decide a part of history on each of these terms. Raise HelperGone."""
    if recording.events < FORKED_FROM or cores() == 1 or len(terms) == 1:
        return [take(recording, one) for one in terms]
    global _task
    _task = recording, terms
    gc.freeze()  # what a process only reads it need not copy
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
