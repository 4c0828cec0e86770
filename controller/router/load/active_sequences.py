"""Tracks active requests by worker rank: blocks in use, prompt tokens to prefill, request counts.

    add ──▶ prefill ── first token ──▶ decoding ── free ──▶ gone
              └────────────────────── free ───────────────────┘

A router knows when its requests begin and end, so it counts them itself and polls no worker. It counts a request before
sending it. The next choice therefore includes that request, and two simultaneous requests do not go to the same idle worker.

A block is counted once per DP rank, however many of the rank's requests share the block. A prompt counts with its uncached
tokens until its first answer token. If the oldest prompt of a rank has a predicted prefill time, the rank's tokens to prefill
decrease with time, at the pace of that prompt. If all prompts of the rank have a prediction, the tokens decrease down to 0, as
in NVIDIA Dynamo's router. If one of the prompts has none, the tokens decrease only by those of the oldest prompt.
Recently sent tokens count for some seconds after they have been prefilled.

The prefixes in use form a tree of pieces. A piece is consecutive blocks used by the same requests, with the number of
requests per holder (a DP rank). `use` adds a request along a path of pieces and `drop` removes a request, piece by piece,
not block by block. A piece without requests is removed. Only whole prefixes are used, so a holder never has a block without
the blocks before it.

The loads are stored in columns, one row per holder, so that a choice among a thousand holders needs only a few vector
sums.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from controller.router.endpoints import WorkerRank
from controller.router.index.index import common

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
RequestId = int | str | tuple[str, int | str]
"""A request's id: a number or string for this frontend's requests; for others, a pair of their frontend's name and such an id."""

STALE_S = 3600.0
"""Age in seconds at which a request is dropped, because its frontend should have freed it long before."""
LOOK_S = 30.0  # seconds between two scans for such requests
RECENT_S = 10.0
"""Decay time in seconds of recently sent prompt tokens: their weight falls to 1/e in this time."""
_PREFILL, _BLOCKS, _REQUESTS, _PACE, _SINCE, _READ_MAX, _RECENT, _LAST = range(8)
_ROWS = 64  # initial number of rows


@dataclass(frozen=True, slots=True)
class RankWork:
    """The work of one DP rank: prompt tokens to prefill, blocks in use, requests, and recently sent prompt tokens."""

    prefill_tokens: float = 0.0
    blocks: float = 0.0
    requests: int = 0
    recent_tokens: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Loads:
    """The work of many DP ranks as columns, in the order in which the caller listed the ranks."""

    prefill_tokens: Floats
    blocks: Floats
    requests: Floats
    recent_tokens: Floats  # prompt tokens sent recently, with exponentially decaying weight


@dataclass(slots=True)
class RankLoad:
    """The live load of one DP rank, updated in place: a caller that keeps the object sees the changes."""

    row: int
    requests: dict[RequestId, None] = field(default_factory=dict)
    blocks: float = 0.0
    reading: "OrderedDict[RequestId, tuple[int, float | None]]" = field(default_factory=OrderedDict)
    reading_tokens: int = 0
    unpaced: int = 0  # number of prompts without a predicted prefill time
    anchored: float = 0.0  # time at which the prefill of the oldest prompt began
    recent_tokens: float = 0.0  # value at the time when the last prompt was sent
    last: float = 0.0  # time at which the last prompt was sent

    def sent(self, tokens: int, now: float) -> None:
        """Add the tokens of a prompt that was sent at `now` to the recently sent tokens.

        `now` may be before the last prompt's time, if another frontend reported late.
        """
        since = now - self.last
        if since < 0.0:
            self.recent_tokens += tokens * exp(since / RECENT_S)
        else:
            self.recent_tokens = self.recent_tokens * exp(-since / RECENT_S) + tokens
            self.last = now

    def recent_tokens_at(self, now: float) -> float:
        """Return the recently sent prompt tokens at `now`, with exponentially decaying weight."""
        since = now - self.last
        return self.recent_tokens * exp(-since / RECENT_S) if since > 0.0 else self.recent_tokens


class Request(msgspec.Struct):
    """One request in flight, as `ActiveSequences` counts it."""

    holder: WorkerRank
    work: RankLoad  # the live load of the holder
    blocks: Sequence[int]  # sequence hashes of the prompt's full blocks
    own_blocks: int  # blocks that no other request can share
    block_tokens: int
    prefill_tokens: int
    expected_s: float | None
    owner: str
    since: float
    reading: bool = True
    output_tokens: int = 0
    output_blocks: int = 0


@dataclass(slots=True, eq=False, repr=False)
class SharedBlocks:
    """A piece: consecutive blocks used by the same set of requests."""

    blocks: Sequence[int]
    users: dict[int, int]  # number of requests by user (the row of a holder)
    children: dict[int, "SharedBlocks"] = field(default_factory=dict)  # child pieces by their first block

    def split(self, place: int) -> None:
        """Split this piece: keep the blocks before `place`, and move the rest into a new piece, the only child."""
        tail = SharedBlocks(self.blocks[place:], self.users.copy())
        tail.children = self.children
        self.blocks = self.blocks[:place]
        self.children = {tail.blocks[0]: tail}

    def join(self) -> None:
        """Merge with the only child if the same requests use both pieces."""
        if len(self.children) != 1 or not self.blocks:
            return
        child = next(iter(self.children.values()))
        if child.users == self.users:
            self.blocks = [*self.blocks, *child.blocks]
            self.children = child.children


class Prefixes:
    """The tree of all prefixes in use. A user is a holder (a DP rank), given by its row.

    `use` and `drop` return the change in the user's number of distinct blocks.
    """

    def __init__(self) -> None:
        self._root = SharedBlocks((), {})

    def use(self, user: int, blocks: Sequence[int]) -> int:
        """Add a request with these blocks at a user, which is a DP rank given by its row.

        Return the number of blocks that are new at the user.
        """
        piece, depth, gained = self._root, 0, 0
        while depth < len(blocks):
            child = piece.children.get(blocks[depth])
            if child is None:
                piece.children[blocks[depth]] = SharedBlocks(blocks[depth:], {user: 1})
                return gained + len(blocks) - depth
            size = common(child.blocks, 0, blocks, depth)
            if size < len(child.blocks):
                child.split(size)
            count = child.users.get(user, 0)
            child.users[user] = count + 1
            if count == 0:
                gained += size
            piece, depth = child, depth + size
        return gained

    def drop(self, user: int, blocks: Sequence[int]) -> int:
        """Remove a request that was added by `use` with these blocks.

        Return the change in the user's blocks: 0 or negative.
        """
        last, depth, lost, length = self._root, 0, 0, len(blocks)
        while depth < length:
            piece = last.children[blocks[depth]]
            size, users = len(piece.blocks), piece.users
            count = users[user]
            if count > 1:
                users[user] = count - 1
            elif len(users) == 1:  # no other user has this piece or any piece below it
                del last.children[blocks[depth]]
                lost += length - depth
                break
            else:
                del users[user]
                lost += size
            last, depth = piece, depth + size
        if depth:
            last.join()
        return -lost

    def pieces(self, blocks: Sequence[int]) -> list[tuple[int, dict[int, int]]]:
        """Return the pieces along these blocks, each as its depth and its number of requests by user (DP rank).

        The depth counts the given blocks up to the piece's end. If the given blocks differ from the piece before its end,
        the depth counts only the blocks before the difference. A user of a piece uses all pieces before that piece.
        """
        children, depth = self._root.children, 0
        found: list[tuple[int, dict[int, int]]] = []  # `list[...]()` takes as long as ten of these steps
        while depth < len(blocks) and (child := children.get(blocks[depth])) is not None:
            size = common(child.blocks, 0, blocks, depth)
            depth += size
            found.append((depth, child.users))
            if size < len(child.blocks):
                break
            children = child.children
        return found


class RequestListener(Protocol):
    """Receives the events of this frontend's own requests."""

    def added(self, request: RequestId, entry: Request) -> None:
        """Handle the start of a request."""

    def read(self, request: RequestId) -> None:
        """Handle the end of a request's prefill."""

    def freed(self, request: RequestId) -> None:
        """Handle the end of a request."""


class ActiveSequences:
    """All requests in flight by holder (a DP rank with its own KV cache).

    One tracker serves all models of a frontend.
    """

    def __init__(self, *, track_output: bool = False) -> None:
        """Start without requests. `track_output` also counts the blocks of answers, as reported by `output`."""
        self._track_output = track_output
        self._looked = float("-inf")
        self._work: dict[WorkerRank, RankLoad] = {}
        self._requests: dict[RequestId, Request] = {}
        self._active = Prefixes()
        self._columns: Floats = np.zeros((8, _ROWS))
        # by row: loads to write into the columns before the next read
        self._unwritten: dict[int, RankLoad] = {}
        self._free_rows = list(range(_ROWS - 1, -1, -1))
        # whether tokens to prefill shrink with time, so that only `loads` has current values
        self.paced = False
        self.layout = 0  # incremented when a row is assigned to another holder
        self._listener: RequestListener | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._requests

    def listen(self, listener: RequestListener) -> None:
        """Report each later event of this frontend's requests to `listener`, in order."""
        self._listener = listener

    # --- request lifecycle --------------------------------------------------------------------------------

    def add(
        self,
        request: RequestId,
        holder: WorkerRank,
        blocks: Sequence[int] = (),
        *,
        now: float,
        prefill_tokens: int = 0,
        block_tokens: int = 16,
        own_blocks: int = 0,
        expected_s: float | None = None,
        owner: str = "",
    ) -> bool:
        """Add a request to a holder before the request is sent. Return False, without effect, if it is already there.

        Args:
            blocks: sequence hashes of the prompt's full blocks.
            own_blocks: number of further blocks, of prompts without hashes, which cannot be shared.
            prefill_tokens: prompt tokens that are not in the prefix cache.
            expected_s: predicted prefill time in seconds, if known.
            owner: name of the frontend that sent the request; empty for this one.

        A holder that is not known yet starts without load.
        """
        if request in self._requests:
            return False
        work = self._work.get(holder) or self._of(holder)
        entry = self._requests[request] = Request(
            holder, work, blocks, own_blocks, block_tokens, prefill_tokens, expected_s, owner, now
        )
        entry.reading = prefill_tokens > 0
        work.requests[request] = None
        work.blocks += own_blocks + self._active.use(work.row, blocks)
        if entry.reading:
            if not work.reading:
                work.anchored = now
            work.reading[request] = (prefill_tokens, expected_s)
            work.reading_tokens += prefill_tokens
            work.unpaced += expected_s is None
            work.sent(prefill_tokens, now)
            self.paced = self.paced or expected_s is not None
        self._unwritten[work.row] = work
        if self._listener is not None and not owner:
            self._listener.added(request, entry)
        return True

    def prefill_done(self, request: RequestId, *, now: float) -> bool:
        """Record that a prompt is prefilled, because its first answer token has come. Return False if nothing changes."""
        found = self._requests.get(request)
        if found is None or not found.reading:
            return False
        work = found.work
        self._end_reading(request, found, work, now)
        self._unwritten[work.row] = work
        if self._listener is not None and not found.owner:
            self._listener.read(request)
        return True

    def output(self, request: RequestId, tokens: int) -> None:
        """Record `tokens` more answer tokens, and count the blocks that they fill."""
        found = self._requests.get(request)
        if not self._track_output or found is None:
            return
        found.output_tokens += tokens
        blocks = found.output_tokens // found.block_tokens
        if blocks == found.output_blocks:
            return
        work = found.work
        work.blocks += blocks - found.output_blocks
        found.output_blocks = blocks
        self._unwritten[work.row] = work

    def free(self, request: RequestId, *, now: float) -> bool:
        """Remove a request that has ended, whatever its outcome. Return False if the request is unknown."""
        found = self._requests.pop(request, None)
        if found is None:
            return False
        work = found.work
        if found.reading:
            self._end_reading(request, found, work, now)
        del work.requests[request]
        work.blocks += self._active.drop(work.row, found.blocks) - found.own_blocks - found.output_blocks
        self._unwritten[work.row] = work
        if self._listener is not None and not found.owner:
            self._listener.freed(request)
        return True

    # --- removal --------------------------------------------------------------------------------------

    def forget(self, holder: WorkerRank, *, now: float) -> None:
        """Remove a holder that no longer exists, with its requests."""
        work = self._work.get(holder)
        if work is None:
            return
        for request in list(work.requests):
            self.free(request, now=now)
        del self._work[holder]
        self._unwritten.pop(work.row, None)
        self._columns[:, work.row] = 0.0
        self._free_rows.append(work.row)
        self.layout += 1

    def leave(self, owner: str, *, now: float) -> int:
        """Remove the requests of a frontend that no longer exists. Return their number."""
        gone = [name for name, one in self._requests.items() if one.owner == owner]
        for request in gone:
            self.free(request, now=now)
        return len(gone)

    def expire(self, *, now: float) -> Sequence[RequestId]:
        """Free and return the requests that were added at least STALE_S ago.

        The report of such a request's end is assumed to be lost. The requests are scanned at most once per LOOK_S, however
        often this is called.
        """
        if now - self._looked < LOOK_S:
            return ()
        self._looked = now
        stale = [name for name, one in self._requests.items() if now - one.since >= STALE_S]
        for request in stale:
            self.free(request, now=now)
        return stale

    # --- queries ------------------------------------------------------------------------------

    @property
    def holders(self) -> Iterable[WorkerRank]:
        """All holders (DP ranks) that this tracker has seen in a call, except those removed by `forget`."""
        return self._work.keys()

    def requests(self, owner: str = "") -> Iterable[tuple[RequestId, Request]]:
        """Return the requests in flight of one frontend, by default of this one."""
        return [(name, one) for name, one in self._requests.items() if one.owner == owner]

    def work(self, holder: WorkerRank, *, now: float) -> RankWork:
        """Return the work of one holder. An unknown holder has no work.

        If the number of tokens to prefill decreases with time, it is computed from the columns, which is slow.
        """
        if (work := self._work.get(holder)) is None:
            return RankWork()
        prefill: float = work.reading_tokens
        if self.paced:
            prefill = float(self.loads(np.array([work.row]), now=now).prefill_tokens[0])
        return RankWork(prefill, work.blocks, len(work.requests), work.recent_tokens_at(now))

    def rows(self, holders: Iterable[WorkerRank]) -> Rows:
        """Return the row numbers of these holders in the columns, for `loads`. They are valid until `layout` changes."""
        return np.array([self._of(holder).row for holder in holders], dtype=np.intp)

    def loads(self, rows: Rows, *, now: float) -> Loads:
        """Return the work of the holders in these rows at time `now`."""
        if self._unwritten:
            for work in self._unwritten.values():
                self._write(work)
            self._unwritten.clear()
        columns = self._columns.take(rows, axis=1)
        prefill = columns[_PREFILL]
        if self.paced:
            read = np.floor(columns[_PACE] * np.maximum(now - columns[_SINCE], 0.0))
            prefill -= np.minimum(read, columns[_READ_MAX])
        recent_tokens = columns[_RECENT] * np.exp(np.minimum(columns[_LAST] - now, 0.0) / RECENT_S)
        return Loads(prefill, columns[_BLOCKS], columns[_REQUESTS], recent_tokens)

    def rank_loads(self, holders: Iterable[WorkerRank]) -> list[RankLoad]:
        """Return the live load of each of these holders. The result is valid until `layout` changes."""
        return [self._of(holder) for holder in holders]

    def pieces(self, blocks: Sequence[int]) -> Sequence[tuple[int, Mapping[int, int]]]:
        """Return the pieces (runs of blocks in use together) along a prompt, each as its depth and its users.

        The depth is that of `Prefixes.pieces`. The users are a mapping from each holder's row to its number of requests.
        """
        return self._active.pieces(blocks)

    def shared(self, blocks: Sequence[int], rows: Rows) -> tuple[Floats, Floats]:
        """Return how many leading blocks of a prompt each row's holder uses, and in how many requests.

        Only requests that use all of these leading blocks are counted. The result is two columns with one value per row.
        """
        depths, requests = np.zeros((2, self._columns.shape[1]))
        for depth, users in self._active.pieces(blocks):
            used = np.fromiter(users, np.intp, len(users))
            depths[used] = depth
            requests[used] = np.fromiter(users.values(), float, len(users))
        return depths[rows], requests[rows]

    def _of(self, holder: WorkerRank) -> RankLoad:
        work = self._work.get(holder)
        if work is None:
            if not self._free_rows:
                size = self._columns.shape[1]
                self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
                self._free_rows = list(range(2 * size - 1, size - 1, -1))
            work = self._work[holder] = RankLoad(self._free_rows.pop())
            self.layout += 1
        return work

    def _end_reading(self, request: RequestId, found: Request, work: RankLoad, now: float) -> None:
        found.reading = False
        oldest = next(iter(work.reading))
        tokens, expected_s = work.reading.pop(request)
        work.reading_tokens -= tokens
        work.unpaced -= expected_s is None
        if request == oldest:
            work.anchored = now

    def _write(self, work: RankLoad) -> None:
        """Write a holder's load into its row of the columns."""
        column = self._columns[:, work.row]
        column[_PREFILL], column[_BLOCKS] = work.reading_tokens, work.blocks
        column[_REQUESTS] = len(work.requests)
        column[_RECENT], column[_LAST] = work.recent_tokens, work.last
        if not self.paced:
            return
        column[_PACE], column[_READ_MAX] = 0.0, 0.0
        if not work.reading:
            return
        tokens, expected_s = next(iter(work.reading.values()))
        if expected_s is None:
            return
        column[_SINCE], column[_READ_MAX] = work.anchored, tokens
        if expected_s <= 0:  # the prompt counts as prefilled, and gives no pace for the others
            column[_PACE], column[_SINCE] = tokens, work.anchored - 1.0
            return
        column[_PACE] = tokens / expected_s
        if not work.unpaced:
            column[_READ_MAX] = work.reading_tokens
