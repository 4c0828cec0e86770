"""What has each worker to do that routers know of: blocks in use, prompt tokens not yet read, requests?

    add ──▶ reading its prompt ── first token ──▶ decoding ── free ──▶ gone
     └───────────────────────────── free ───────────────────────────────┘

A router knows when its requests begin and end, so it keeps this itself, and changes it before a request leaves: the next
choice sees it at once. No other need be asked, and two requests of one moment do not go to the same idle worker.

A block is counted once on a worker, however many of its requests begin with it. A prompt that is being read weighs what
is left of it: all of it until its first token, or, where it is known how long reading takes, less with time (§4.6 of
Dynamo's rules: the oldest prompt's pace is that of all, if all are known; else only the oldest shrinks). What was sent there
lately is remembered for some seconds after it has been read.

Which prefixes are in use is a tree of pieces: consecutive blocks that the same requests use, with how many of each holder's
requests begin with them. A use adds one along a path and a drop takes it away, in steps of pieces, not of blocks; a piece that
no request uses is not there. Only whole prefixes are used, so a holder has no block without those before it.

The loads lie in columns, one row for each holder, so that a choice among a thousand takes no longer than a few sums.
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
"""What names a request: ours by a number or a name, another frontend's with that one's name before it."""

STALE_S = 3600.0
"""A request that was added so long ago is forgotten: whoever should have freed it has not."""
LOOK_S = 30.0  # how often such requests are looked for
RECENT_S = 10.0
"""A prompt that was sent so long ago counts e times less among those that were sent lately."""
_PREFILL, _BLOCKS, _REQUESTS, _PACE, _SINCE, _READ_MAX, _RECENT, _LAST = range(8)
_ROWS = 64  # to begin with


@dataclass(frozen=True, slots=True)
class RankWork:
    """What a holder has to do: prompt tokens to be read, blocks in use, requests. And what it was given lately to be read."""

    prefill_tokens: float = 0.0
    blocks: float = 0.0
    requests: int = 0
    recent_tokens: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Loads:
    """What many holders have to do, as columns in the order in which they were asked for."""

    prefill_tokens: Floats
    blocks: Floats
    requests: Floats
    recent_tokens: Floats  # that were sent there to be read, each counting the less the longer ago that was


@dataclass(slots=True)
class RankLoad:
    """What a holder has to do, as it stands: whoever keeps one sees it change."""

    row: int
    requests: dict[RequestId, None] = field(default_factory=dict)
    blocks: float = 0.0
    reading: "OrderedDict[RequestId, tuple[int, float | None]]" = field(default_factory=OrderedDict)
    reading_tokens: int = 0
    unpaced: int = 0  # prompts of which it is not known how long reading them takes
    anchored: float = 0.0  # since when the oldest of them is read
    recent_tokens: float = 0.0  # as it was when the last prompt was sent
    last: float = 0.0  # when that was

    def sent(self, tokens: int, now: float) -> None:
        """Remember a prompt that was sent then; of another frontend's one may hear later."""
        since = now - self.last
        if since < 0.0:
            self.recent_tokens += tokens * exp(since / RECENT_S)
        else:
            self.recent_tokens = self.recent_tokens * exp(-since / RECENT_S) + tokens
            self.last = now

    def recent_tokens_at(self, now: float) -> float:
        """Return how many prompt tokens were sent there lately, each counting the less the longer ago that was."""
        since = now - self.last
        return self.recent_tokens * exp(-since / RECENT_S) if since > 0.0 else self.recent_tokens


class Request(msgspec.Struct):
    """A request in flight, as it was added."""

    holder: WorkerRank
    work: RankLoad  # of the holder
    blocks: Sequence[int]  # sequence hashes of its prompt's full blocks
    own_blocks: int  # that no other request can share
    block_tokens: int
    prefill_tokens: int
    expected_s: float | None
    owner: str
    since: float
    reading: bool = True
    output_tokens: int = 0
    output_blocks: int = 0


class SharedBlocks:
    """Consecutive blocks that the same requests begin with."""

    __slots__ = ("blocks", "children", "users")

    def __init__(self, blocks: Sequence[int], users: dict[int, int]) -> None:
        self.blocks = blocks
        self.users = users  # how many requests of each
        self.children: dict[int, SharedBlocks] = {}  # by their first block

    def split(self, place: int) -> None:
        """Keep the blocks before `place`; the others become the only child."""
        tail = SharedBlocks(self.blocks[place:], self.users.copy())
        tail.children = self.children
        self.blocks = self.blocks[:place]
        self.children = {tail.blocks[0]: tail}

    def join(self) -> None:
        """Take the only child in, if the same requests use it."""
        if len(self.children) != 1 or not self.blocks:
            return
        child = next(iter(self.children.values()))
        if child.users == self.users:
            self.blocks = [*self.blocks, *child.blocks]
            self.children = child.children


class Prefixes:
    """All prefixes in use. `use` and `drop` return by how many the user's different blocks have become more."""

    def __init__(self) -> None:
        self._root = SharedBlocks((), {})

    def use(self, user: int, blocks: Sequence[int]) -> int:
        """One more request of a user begins with these blocks."""
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
        """A request that began with these blocks, by `use`, is over."""
        last, depth, lost, length = self._root, 0, 0, len(blocks)
        while depth < length:
            piece = last.children[blocks[depth]]
            size, users = len(piece.blocks), piece.users
            count = users[user]
            if count > 1:
                users[user] = count - 1
            elif len(users) == 1:  # no other user has it, nor anything below it
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
        """Return the pieces that these blocks begin with, from the first on: the depth up to which each reaches, or they do in
        it, and how many requests of each user begin with it. A user of a piece uses all pieces before it."""
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
    """What is told of every request of ours."""

    def added(self, request: RequestId, entry: Request) -> None:
        """A request begins."""
        ...

    def read(self, request: RequestId) -> None:
        """Its prompt has been read."""
        ...

    def freed(self, request: RequestId) -> None:
        """It is over."""
        ...


class ActiveSequences:
    """All requests in flight, by holder: whatever has a KV cache of its own. One tracker serves all models of a frontend."""

    def __init__(self, *, track_output: bool = False, stale_s: float = STALE_S) -> None:
        """`track_output`: count the blocks of answers too, as `output` tells of them."""
        self._track_output = track_output
        self._stale_s = stale_s
        self._looked = float("-inf")
        self._work: dict[WorkerRank, RankLoad] = {}
        self._requests: dict[RequestId, Request] = {}
        self._active = Prefixes()
        self._columns: Floats = np.zeros((8, _ROWS))
        self._unwritten: dict[int, RankLoad] = {}  # by row: what the columns say when they are asked next
        self._free_rows = list(range(_ROWS - 1, -1, -1))
        self.paced = False  # whether what is to be read shrinks with time: then only `loads` says it
        self.layout = 0  # moves when a row gets another meaning
        self._listener: RequestListener | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._requests

    def listen(self, listener: RequestListener) -> None:
        """Tell this of every request of ours from now on, in the order in which things happen."""
        self._listener = listener

    # --- the life of a request ----------------------------------------------------------------------------

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
        """Take in that a request goes to a holder, before it leaves. False, and nothing happens, if it is there already.

        `blocks` are the sequence hashes of its prompt; `own_blocks` are counted too, and shared with none (prompts
        without hashes). `prefill_tokens`: those of the prompt that are not in the prefix cache. `expected_s`: so long
        reading them takes, if that is known. `owner`: the frontend that it belongs to, if it
        is not ours. A holder that was not heard of begins with nothing to do.
        """
        if request in self._requests:
            return False
        work = self._work.get(holder) or self._of(holder)
        entry = self._requests[request] = Request(
            holder,
            work,
            blocks,
            own_blocks,
            block_tokens,
            prefill_tokens,
            expected_s,
            owner,
            now,
            prefill_tokens > 0,
        )
        work.requests[request] = None
        work.blocks += own_blocks + self._active.use(work.row, blocks)
        if prefill_tokens > 0:
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
        """Take in that a prompt has been read: the first token is here. False, and nothing happens, if that is no news."""
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
        """Take in that so many more tokens of its answer are here. Each block that they fill is counted as one more."""
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
        """Take in that a request is over, however it ended. False, and nothing happens, if it was not known."""
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

    # --- what is gone --------------------------------------------------------------------------------------

    def forget(self, holder: WorkerRank, *, now: float) -> None:
        """Take in that a holder is gone: its requests are over there."""
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
        """Take in that another frontend is gone, with its requests. Return how many it had."""
        gone = [name for name, one in self._requests.items() if one.owner == owner]
        for request in gone:
            self.free(request, now=now)
        return len(gone)

    def expire(self, *, now: float) -> Sequence[RequestId]:
        """Free what was added too long ago, and return it: the guard against leaks. Looks twice a minute, however often it is
        called."""
        if now - self._looked < LOOK_S:
            return ()
        self._looked = now
        stale = [name for name, one in self._requests.items() if now - one.since >= self._stale_s]
        for request in stale:
            self.free(request, now=now)
        return stale

    # --- what there is to do ------------------------------------------------------------------------------

    @property
    def holders(self) -> Iterable[WorkerRank]:
        """All that were ever given a request or asked about, and were not forgotten."""
        return self._work.keys()

    def requests(self, owner: str = "") -> Iterable[tuple[RequestId, Request]]:
        """Return a frontend's requests in flight; ours by default."""
        return [(name, one) for name, one in self._requests.items() if one.owner == owner]

    def work(self, holder: WorkerRank, *, now: float) -> RankWork:
        """Return what a holder has to do. Of the columns only where that shrinks with time: a choice among a thousand workers may
        ask for each."""
        if (work := self._work.get(holder)) is None:
            return RankWork()
        prefill: float = work.reading_tokens
        if self.paced:
            prefill = float(self.loads(np.array([work.row]), now=now).prefill_tokens[0])
        return RankWork(prefill, work.blocks, len(work.requests), work.recent_tokens_at(now))

    def rows(self, holders: Iterable[WorkerRank]) -> Rows:
        """Return the rows of holders, for `loads`. They hold for as long as `layout` stays what it is now."""
        return np.array([self._of(holder).row for holder in holders], dtype=np.intp)

    def loads(self, rows: Rows, *, now: float) -> Loads:
        """Return what the holders in these rows have to do."""
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
        """Return what each holder has to do, to be looked at for as long as `layout` stays what it is now."""
        return [self._of(holder) for holder in holders]

    def pieces(self, blocks: Sequence[int]) -> Sequence[tuple[int, Mapping[int, int]]]:
        """Return what `shared` does, piece by piece: a depth, and by row how many requests reach it."""
        return self._active.pieces(blocks)

    def shared(self, blocks: Sequence[int], rows: Rows) -> tuple[Floats, Floats]:
        """Return how many of a prompt's blocks, from the first on, the holders in these rows have in use already, and how
        many of their requests have all of those."""
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
        """Write what a holder has to do into its row."""
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
        if expected_s <= 0:  # it is as good as read, and says nothing of the others' pace
            column[_PACE], column[_SINCE] = tokens, work.anchored - 1.0
            return
        column[_PACE] = tokens / expected_s
        if not work.unpaced:
            column[_READ_MAX] = work.reading_tokens
