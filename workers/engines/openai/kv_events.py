"""Receives the KV events of an upstream's prefix cache over ZeroMQ (vLLM, SGLang).

The upstream publishes numbered KV-event batches, and replays lost batches on request. The sockets and their multipart messages:

    SUB      tcp://host:5557    (topic, number, payload); the number has 8 bytes, big endian
    DEALER   tcp://host:5558    a replay: send ("", first number); each answer is ("", [topic,] number, payload), the last has -1

Each DP rank publishes on a port of its own, which is one above that of the previous rank. One separate thread receives the
events of all ranks, because decoding and hashing the blocks of a busy server would delay the streams on the event loop.
`kv_rank` restores lost batches, and `kv_names` translates block names. No other module uses ZeroMQ. This module is imported
only if an upstream's KV events are configured.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from events.wire import Generate
from workers.engines.engine import Announce
from workers.engines.openai.kv_rank import Frame, NoReplay, UpstreamRank, no_replay

POLL_MS = 100  # an idle thread notices `stop` after this time at the latest
HEARD_MAX = 1000  # KV-event batches received from one rank before the other ranks are polled
BATCH_BYTES_MAX = 256 * 1024 * 1024
WAITING_MAX = 100_000  # queued KV-event batches; vLLM keeps as many for a slow subscriber
# wait for the next answer of a replay; the upstream polls for requests at least every 0.1 s
REPLAY_SILENCE_S = 2.0
REPLAY_S_MAX = 30.0  # for a whole replay
RECONNECT_S_MAX = 2.0
QUIET_S = 10.0  # if a rank publishes nothing for longer, a replay is requested to detect lost batches
PAUSE_S = 1.0  # after an unexpected exception, which is a bug of this worker
STOP_S_MAX = 1.0
_NUMBER_BYTES = 8

log = structlog.get_logger(__name__)


class UpstreamKvEvents:
    """Receives the KV events of one upstream, and announces them with sequence hashes as block names."""

    def __init__(
        self, endpoints: Sequence[str], replays: Sequence[str], announce: Announce, quiet_s: float = QUIET_S
    ) -> None:
        """Prepare a subscription to the KV events. The subscription begins with `start`.

        Args:
            endpoints: the endpoints on which the DP ranks publish, one per rank.
            replays: the endpoints that replay lost KV-event batches, one per rank; empty: there are none.
            announce: called with the number of a rank and its KV events, from the receiving thread.
            quiet_s: if a rank publishes nothing for this many seconds, a replay is requested from it.
        """
        self._quiet_s = quiet_s
        self._context = zmq.Context()
        self._ranks = [
            UpstreamRank(rank, announce, partial(self._replay, replays[rank]) if replays else no_replay)
            for rank in range(len(endpoints))
        ]
        self._endpoints = endpoints
        self._replays = bool(replays)
        self._bad_frames = 0
        self._bugs = 0
        self._met: set[UpstreamRank] = set()  # ranks that have accepted the subscription at least once
        # time of each rank's last message or check, monotonic seconds
        self._heard_at: dict[UpstreamRank, float] = {}
        self.over = False  # True: the thread must end
        self._thread = threading.Thread(target=self._run, name="upstream-kv-events", daemon=True)

    def start(self) -> None:
        """Start the receiving thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the receiving thread. Wait up to a second for its end. May be called from any thread, and more than once."""
        self.over = True
        if self._thread.is_alive():
            self._thread.join(STOP_S_MAX)

    def salted(self, request: Generate) -> None:
        """Record, for all ranks, the prompt of a request that is being sent to the upstream with a cache salt."""
        for rank in self._ranks:
            rank.names.salted(request.tokens, request.adapter)

    @property
    def connected(self) -> bool:
        """Whether every rank has accepted the subscription, and has been asked to replay its batches, at least once."""
        return len(self._met) == len(self._ranks)

    @property
    def block_tokens(self) -> int | None:
        """Number of tokens per block. None until a KV event has reported a stored block."""
        sizes = [rank.names.block_tokens for rank in self._ranks]
        return max((size for size in sizes if size is not None), default=None)

    @property
    def counters(self) -> dict[str, int]:
        """Counts of received KV-event batches and of errors in them, by name, over all ranks."""
        total: Counter[str] = Counter(bad_frames=self._bad_frames, mistakes=self._bugs)
        for rank in self._ranks:
            total.update(rank.counts())
        return dict(total)

    # --- the thread

    def _run(self) -> None:
        sockets: dict[zmq.Socket[bytes], UpstreamRank] = {}
        monitors: dict[zmq.Socket[bytes], UpstreamRank] = {}
        poller = zmq.Poller()
        try:
            for endpoint, rank in zip(self._endpoints, self._ranks, strict=True):
                subscriber = self._subscribe(endpoint)
                sockets[subscriber] = rank
                monitors[subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)] = rank
                subscriber.connect(endpoint)
            for socket in (*sockets, *monitors):
                poller.register(socket, zmq.POLLIN)
            while not self.over:
                ready = dict(poller.poll(POLL_MS))
                for monitor, rank in monitors.items():
                    if monitor in ready:
                        self._safely(rank, partial(self._watch, monitor, rank))
                for socket, rank in sockets.items():
                    if socket in ready:
                        self._safely(rank, partial(self._receive, socket, rank))
                if self._replays:
                    self._check_silent_ranks()
        finally:
            for socket in sockets:
                socket.disable_monitor()
            self._context.destroy(linger=0)

    def _check_silent_ranks(self) -> None:
        now = time.monotonic()
        for rank, heard_at in self._heard_at.items():
            if now - heard_at > self._quiet_s:
                self._heard_at[rank] = now
                self._safely(rank, rank.check)

    def _subscribe(self, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.setsockopt(zmq.RCVHWM, WAITING_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, round(RECONNECT_S_MAX * 1e3))
        # A host that crashes does not close its connections. Only heartbeats detect that such a connection is dead.
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
        # all topics, because an endpoint belongs to one rank of one upstream
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        return socket

    def _safely(self, rank: UpstreamRank, work: Callable[[], None]) -> None:
        """Run `work`, a function that receives or requests batches of `rank`. An exception does not end the thread.

        If `work` fails, log the error and announce that the rank's cache is empty, so that no wrong block stays listed.
        """
        try:
            work()
        except Exception:
            if self.over:  # errors during the stop have no consequence
                return
            self._bugs += 1
            log.exception("upstream_kv_events_failed")
            with contextlib.suppress(Exception):  # the announcement itself may be what failed
                rank.clear(another_life=True)
            time.sleep(PAUSE_S)

    def _watch(self, monitor: "zmq.Socket[bytes]", rank: UpstreamRank) -> None:
        """Request a rank's missed batches whenever the monitor socket reports a connection or reconnection to the rank."""
        while monitor.poll(0):
            recv_monitor_message(monitor)
            self._heard_at[rank] = time.monotonic()
            rank.restore()
            self._met.add(rank)

    def _receive(self, socket: "zmq.Socket[bytes]", rank: UpstreamRank) -> None:
        self._heard_at[rank] = time.monotonic()
        for _ in range(HEARD_MAX):
            if self.over or not socket.poll(0):
                return
            frames = socket.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
                self._bad_frames += 1
                continue
            rank.receive(int.from_bytes(frames[1], "big"), frames[2])

    def _replay(self, endpoint: str, first: int) -> Iterator[Frame]:
        """Request a replay from batch number `first` on, and yield the number and payload of each batch.

        Raise NoReplay if the endpoint does not complete the replay in time, or sends an invalid message.
        """
        until = time.monotonic() + REPLAY_S_MAX
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, "[" in endpoint)
            # no limit for received batches: if this socket did not accept them at once, the upstream would drop them
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
            socket.connect(endpoint)
            socket.send_multipart([b"", first.to_bytes(_NUMBER_BYTES, "big")])
            while True:
                frames = self._answer(socket, endpoint, until)
                number = int.from_bytes(frames[-2], "big", signed=True)
                if number < 0:
                    return
                yield number, frames[-1]

    def _answer(self, socket: "zmq.Socket[bytes]", endpoint: str, until: float) -> list[bytes]:
        """Return the frames of a replay's next message. Raise NoReplay if the message is late or invalid.

        `until` is the monotonic time, in seconds, by which the whole replay must have ended.
        """
        silent = time.monotonic() + REPLAY_SILENCE_S
        while self.over or not socket.poll(POLL_MS):
            if self.over or time.monotonic() > min(silent, until):
                raise NoReplay(f"{endpoint} does not answer within {REPLAY_SILENCE_S:g} s")
        if time.monotonic() > until:
            raise NoReplay(f"{endpoint} has not ended its replay within {REPLAY_S_MAX:g} s")
        frames = socket.recv_multipart()
        if len(frames) not in (3, 4) or len(frames[-2]) != _NUMBER_BYTES:
            self._bad_frames += 1
            raise NoReplay(f"{endpoint} sends an invalid replay")
        return frames
