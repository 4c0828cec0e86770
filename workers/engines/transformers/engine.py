"""The transformers engine's interface to the worker, and the thread that runs the model's steps.

    worker's loop ── submit, cancel ──▶ inbox ──▶ engine's thread: plan → compute → choose ──▶ deliver

The thread sleeps while there is no work. Calls from the worker's event loop are put into an inbox, which the thread empties
between two steps. The event loop reads the phase, an immutable object that the thread replaces. Load reports and moves
(moving.py) access the block tables from the event loop, under a lock that the thread also uses.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import structlog
import torch

from events.observations import Profile
from events.wire import Chunk, Generate, Load
from workers.engines.engine import (
    CANARIES_MAX,
    Announce,
    Awaits,
    Deliver,
    EngineDead,
    EngineIdentity,
    Phase,
    discard_events,
    discard_output,
)
from workers.engines.transformers.loading import load_model, revision_of
from workers.engines.transformers.model import Check, make_exact
from workers.engines.transformers.moving import TorchMoves, TransformersExport, TransformersImport
from workers.engines.transformers.sequence import SequenceWork
from workers.engines.transformers.settings import TransformersSettings
from workers.engines.transformers.stepper import Output, Stepper, measured_profile
from workers.kv_transfer.messages import Description

log = structlog.get_logger(__name__)

STOP_DEADLINE_S = 1.5  # wait for the thread's end; the worker waits longer for the engine's stop
FAILURES_MAX = 3  # consecutive failed steps after which the engine is dead


class TransformersEngine:
    """An `Engine` that serves a Llama-family model from a local folder.

    At the start, the function that is passed as `check` (by default `make_exact`) determines whether the model is exact on this
    machine. Exact means that the model's logits do not depend on the rest of the batch.
    """

    def __init__(self, settings: TransformersSettings, check: Check = make_exact) -> None:
        self._settings = settings
        self._check = check
        self.announces = settings.prefix_caching
        # until the model is loaded
        blank = Profile(
            kv_blocks=0, block_tokens=settings.block_tokens, max_batch=0, prefill_tokens_per_s=0, tpot_ms=()
        )
        self.identity = _identity(settings, settings.context_tokens, blank)
        self.kv: tuple[Description, ...] = ()
        self._inbox: deque[Callable[[Stepper], None]] = deque()
        self._wake = threading.Condition()
        self._busy = False  # whether there was work in the last iteration of the engine's thread
        # blocks or a slot have become free, so that waiting requests may be able to run
        self._changed = False
        self.moves: TorchMoves | None = None
        self._stopping = threading.Event()
        self._stepper: Stepper | None = None
        self._deliver: Deliver = discard_output
        self._announce: Announce = discard_events
        self._phase = Phase(since=time.monotonic())
        self._dead: str | None = None
        self._failures = 0  # consecutive failed steps
        self._thread: threading.Thread | None = None

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        """Load the model, check whether it is exact, measure its speed, and begin to run steps.

        Raise EngineDead with the reason if the model cannot be served.
        """
        self._deliver, self._announce = deliver, announce
        ready: Future[str | None] = Future()
        ready.set_running_or_notify_cancel()  # from now on, a cancelled caller cannot cancel this future
        self._thread = threading.Thread(
            target=self._main, args=(ready.set_result,), name="engine", daemon=True
        )
        self._thread.start()
        try:
            # wait_for of Python 3.11 can swallow a cancellation
            async with asyncio.timeout(self._settings.load_s):
                reason = await asyncio.wrap_future(ready)
        except TimeoutError:
            self._stopping.set()
            reason = f"loading {self._settings.folder} took longer than {self._settings.load_s:g} s"
        if reason is not None:
            raise EngineDead(reason)
        self.moves = TorchMoves(self.stepper, self._put, self._wake_up)

    def awaits(self) -> Awaits | None:
        """Return an `Awaits` for the loading of the model, or None once the model is loaded."""
        if self._stepper is not None:
            return None
        return Awaits(f"it is loading {self._settings.folder}", self.identity.model)

    def submit(self, key: int, request: Generate) -> None:
        """Put a request into the inbox, or deliver an error at once if the request cannot be accepted."""

        def submit(stepper: Stepper) -> None:
            if chunk := stepper.submit(key, request):
                self._deliver([(key, chunk)])

        if refusal := self._refusal(request):
            self._deliver([(key, Chunk(request.stream, [], error=refusal))])
        else:
            self._put(submit)

    def cancel(self, key: int) -> None:
        """Drop a request before the next step. Blocks and slots reserved for its move are freed at once."""
        if self.moves is not None:
            self.moves.cancel(key, "it has been cancelled")
        self._put(lambda stepper: stepper.cancel(key))

    def trust(self, trusted: bool) -> None:
        """Drop the prefix cache before the next step. If not `trusted`, keep no prefix cache until a call with `trusted` true."""
        self._put(lambda stepper: stepper.trust(trusted))

    def limit_batch(self, share: float) -> None:
        """Limit the running batch to this share of its full size, from the next step on."""
        self._put(lambda stepper: stepper.limit_batch(share))

    def export(self, key: int) -> TransformersExport | None:
        """Prepare to move a request to another worker. Return None if the request cannot move, see `Engine.export`."""
        if self.moves is None or self._stepper is None:
            return None
        departure = self._stepper.depart(key)
        return None if departure is None else TransformersExport(self.moves, departure)

    def reserve(self, key: int, request: Generate, room_tokens: int) -> TransformersImport | str:
        """Reserve KV blocks for a request that arrives with its KV cache, or return the reason for a refusal.

        `room_tokens` is the largest number of tokens that the request can have when it arrives.
        """
        if self.moves is None or self._stepper is None or self._dead is not None:
            return "engine_error: the engine is not running"
        arrival = self._stepper.refusal(request) or self._stepper.reserve(key, request, room_tokens)
        return arrival if isinstance(arrival, str) else TransformersImport(self.moves, arrival)

    def phase(self) -> Phase:
        """Return the current phase of the engine."""
        return self._phase

    def load(self) -> Load:
        """Return the current load. Each call in the inbox counts as a waiting request."""
        load = Load() if self._stepper is None else self._stepper.load()
        return msgspec.structs.replace(load, waiting=load.waiting + len(self._inbox))

    def ranks(self) -> list[Load]:
        """Return the loads of the DP ranks: an empty list, as for every engine with a single rank."""
        return []

    async def check(self) -> None:
        """Raise EngineDead if the engine's thread has failed, several steps failed in a row, or the fault `die` was injected."""
        if self._stepper is not None and self._stepper.faults.dead:
            raise EngineDead("the transformers engine died, as the rehearsal asked")
        if self._dead is not None:
            raise EngineDead(self._dead)

    def chaos(self, fault: str, argument: float, rank: int = 0) -> bool:
        """Inject a fault, see `TorchFaults`: error, corrupt, drift, sampler, slow, bitflip or die. `heal` ends all but `die`.

        Return False if the fault is unknown, or if the model is not loaded yet.
        """
        faults = None if self._stepper is None else self._stepper.faults
        return faults is not None and faults.inject(fault, argument)

    def heal(self, fault: str, rank: int = 0) -> None:
        """End one fault. Other faults stay active."""
        if self._stepper is not None:
            faults = self._stepper.faults
            faults.heal(fault)

    async def stop(self) -> None:
        """Stop after the current step and free all resources.

        If that step takes longer than STOP_DEADLINE_S (1.5) seconds, return without freeing the resources.
        """
        self._stopping.set()
        with self._wake:
            self._wake.notify_all()
        thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join, STOP_DEADLINE_S)
        if thread is None or not thread.is_alive():
            self._stepper = self.moves = None
            self._inbox.clear()

    # --- on the engine's thread -------------------------------------------------------------------------------------

    def _main(self, report: Callable[[str | None], None]) -> None:
        try:
            self._prepare()
        except EngineDead as error:
            report(str(error))
            return
        except Exception as error:
            log.exception("engine_failed_to_start")
            report(f"the engine could not start: {error!r}")
            return
        report(None)
        try:
            while self._wait():
                self._busy = self._turn()
                if events := self.stepper.take_events():
                    self._announce(0, events)
        except Exception as error:
            log.exception("engine_died")
            self._dead = f"the engine's thread died: {error!r}"
        if self.moves is not None:
            self.moves.end(self._dead or "the engine has stopped")

    def _prepare(self) -> None:
        settings = self._settings
        torch.set_num_threads(settings.threads)
        revision = revision_of(settings.folder)
        model = load_model(settings)
        stepper = Stepper(model, settings)
        exact = self._check(model, stepper.pool, stepper.blocks)
        if not exact:
            log.warning(
                "not_batch_invariant", device=settings.device, dtype=settings.dtype, threads=settings.threads
            )
        profile = settings.profile or measured_profile(stepper, settings)
        self.identity = _identity(settings, stepper.limit, profile, revision=revision, exact=exact)
        self._stepper = stepper
        self.kv = (_description(self.identity, stepper),)

    def _wait(self) -> bool:
        """Wait until there is work, then return True. Return False when the engine must stop."""
        with self._wake:
            while not (self._inbox or self._busy or self._changed or self._stopping.is_set()):
                self._phase = Phase(since=time.monotonic())
                self._wake.wait()
            self._changed = False
        return not self._stopping.is_set()

    def _turn(self) -> bool:
        """Process the inbox, run one step and deliver its output. Return False if no request can continue."""
        stepper = self.stepper
        while self._inbox:
            self._inbox.popleft()(stepper)
        if stepper.faults.dead:
            self._stopping.wait(0.05)  # a dead engine runs no steps; the worker detects its death by `check`
            return stepper.busy
        began = time.monotonic()
        works = stepper.plan()
        if not works:
            return False
        prompt = sum(work.count for work in works if work.count > 1)
        self._phase = Phase("prefill" if prompt else "decode", began, prompt)
        out = self._step(stepper, works)
        if stepper.faults.slow > 1.0:
            self._stopping.wait((time.monotonic() - began) * (stepper.faults.slow - 1.0))
        if out:
            self._deliver(out)
        return True

    def _step(self, stepper: Stepper, works: list[SequenceWork]) -> Output:
        try:
            out = stepper.step(works)
            self._failures = 0
            return out
        except (RuntimeError, ArithmeticError, MemoryError) as error:  # of torch, including out of memory
            self._failures += 1
            log.exception("engine_step_failed", in_a_row=self._failures)
            if self._failures >= FAILURES_MAX:
                self._dead = f"{self._failures} steps in a row failed, the last with: {error}"
            return stepper.fail_all(str(error).strip().partition("\n")[0])

    # --- both -------------------------------------------------------------------------------------------------------

    def _refusal(self, request: Generate) -> str | None:
        if self._stepper is None or self._dead is not None:
            return "engine_error: the engine is not running"
        schedule = self._stepper.schedule
        with self._stepper.lock:  # the engine's thread changes these lists
            canaries, room = schedule.canaries, schedule.room
            waiting = len(schedule.waiting) + len(self._inbox)
        full = waiting - canaries >= self._settings.waiting_max + room
        if full and not (request.canary and canaries < CANARIES_MAX):
            return f"overloaded: {len(schedule.waiting)} requests are waiting already"
        return self._stepper.refusal(request)

    def _put(self, ask: Callable[[Stepper], None]) -> None:
        with self._wake:
            self._inbox.append(ask)
            self._wake.notify()

    def _wake_up(self) -> None:
        with self._wake:
            self._changed = True
            self._wake.notify()

    @property
    def stepper(self) -> Stepper:
        """The engine's stepper. The model must have been loaded."""
        assert self._stepper is not None, "the engine has not started"
        return self._stepper


def _description(identity: EngineIdentity, stepper: Stepper) -> Description:
    keys = stepper.pool.keys
    layers, _, heads, tokens, width = keys.shape
    size = 2 * keys[:, 0].numel() * keys.element_size()
    return Description(identity.model, identity.revision, identity.dtype, layers, heads, width, tokens, size)


def _identity(
    settings: TransformersSettings,
    context_tokens: int,
    profile: Profile,
    *,
    revision: str = "",
    exact: bool = False,
) -> EngineIdentity:
    import transformers

    folder, device = settings.folder.resolve(), settings.device
    if device.startswith("cuda") and torch.cuda.is_available():
        device = torch.cuda.get_device_name(device)
    return EngineIdentity(
        model=settings.model or folder.name,
        revision=revision,
        tokenizer=str(folder),
        engine="transformers",
        engine_version=f"{transformers.__version__}+torch{torch.__version__.partition('+')[0]}",
        dtype=settings.dtype,
        tp=1,
        device=device,
        context_tokens=context_tokens,
        exact=exact,
        profile=profile,
        waiting_max=settings.waiting_max,
    )
