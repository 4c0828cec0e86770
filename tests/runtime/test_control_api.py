"""The operator's control subjects over a real broker: answers, and refusals with a reason."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from controller.adapters.control_api import ControlApi, serve
from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.nats_users import BrokerUsers
from controller.adapters.embedded.server import EmbeddedServer
from controller.ports import Answer, Command, GoldenWish
from controller.runtime.command_sender import command
from events.errors import HoldfastError
from events.journal.nats import NatsJournal
from events.nats.bus import BusUnavailable, NatsBus, NoAnswer, NotAllowed
from events.nats.urls import as_user, with_keys
from events.observations import GoldenAnswer

pytestmark = pytest.mark.servers


ANSWER = {"canary": "c1", "prompt": [1], "tokens": [2]}


class RecordingControl:
    """Operations that record their calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    async def drain(self, worker: str, deadline_s: float | None, by: str, command: Command) -> str:
        self.asked.append(("drain", worker, deadline_s, by))
        return f"{worker} will drain"

    async def move(self, worker: str, to: str, by: str, command: Command) -> str:
        self.asked.append(("move", worker, to, by))
        return f"requests on {worker} will move"

    async def resume(self, worker: str, by: str, command: Command) -> str:
        raise HoldfastError(f"{worker} is dead")

    async def golden(self, wish: GoldenWish, by: str, command: Command) -> str:
        self.asked.append(("golden", wish, by))
        return "the goldens are to be agreed"

    async def status(self) -> dict[str, Any]:
        return {"workers": [{"id": "w1", "weight": 0.5, "last_canary": None}], "leader": None}

    async def chaos(
        self,
        worker: str,
        fault: str,
        argument: float | None,
        duration_s: float | None,
        by: str,
        rank: int | None,
        command: Command,
    ) -> str:
        raise KeyError("a bug of ours")


class Gate:
    """A gate that carries out every command, or none."""

    def __init__(self, leads: bool) -> None:
        self.leads = leads
        self.heard: list[Command] = []

    async def carry_out(self, command: Command, act: Callable[[], Awaitable[object]]) -> Answer | None:
        self.heard.append(command)
        return {"says": str(await act())} if self.leads else None

    async def ours_to_answer(self) -> bool:
        return self.leads


def whole(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with an id and a deadline."""
    return {"id": "command-1", "deadline": (datetime.now(UTC) + timedelta(seconds=9)).isoformat(), **body}


@contextlib.asynccontextmanager
async def served(url: str, leads: bool = True) -> Any:
    control, gate = RecordingControl(), Gate(leads)
    api = ControlApi(url, control, gate)  # type: ignore[arg-type]  # not all operations
    task = asyncio.create_task(api.run())
    bus = await NatsBus.connect(url, "operator")
    try:
        await asyncio.wait_for(api.serving.wait(), 20)
        yield control, bus, gate
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await bus.close()


class CancellingBroker:
    """The control API's broker; one of its calls ends at the moment in which the API is cancelled."""

    def __init__(self, cancelled_in: str) -> None:
        self.cancelled_in, self.stopped = cancelled_in, False
        self.connection = self

    async def start(self) -> None:
        await self._call("start")

    async def flush(self) -> None:
        await self._call("flush")

    async def stop(self) -> None:
        self.stopped = True

    async def _call(self, name: str) -> None:
        answer = asyncio.get_running_loop().create_future()
        if name == self.cancelled_in:
            asyncio.get_running_loop().call_soon(self._both, answer, asyncio.current_task())
        else:
            answer.set_result(None)
        await asyncio.wait_for(answer, 60)  # as nats-py waits

    def _both(self, answer: "asyncio.Future[None]", task: "asyncio.Task[Any] | None") -> None:
        assert task is not None
        answer.set_result(None)
        asyncio.get_running_loop().call_soon(task.cancel)


@pytest.mark.parametrize("call", ["start", "flush"])
async def test_a_cancellation_that_arrives_with_the_brokers_answer_is_obeyed(call: str) -> None:
    broker = CancellingBroker(call)
    serving = asyncio.ensure_future(serve(broker, asyncio.Event()))  # type: ignore[arg-type]
    await asyncio.wait({serving}, timeout=20)
    assert serving.cancelled() and broker.stopped


async def test_a_request_is_answered(nats_url: str) -> None:
    async with served(nats_url) as (control, bus, gate):
        body = whole({"worker": "w1", "deadline_s": 30, "by": "ada"})
        assert await bus.request("control.drain", body) == {"says": "w1 will drain"}
        deadline = datetime.fromisoformat(body["deadline"])
        assert gate.heard == [Command("command-1", deadline, "drain", "w1", "ada")]
        assert control.asked == [("drain", "w1", 30, "ada")]
        moved = await bus.request("control.move", whole({"worker": "w1", "to": "w2", "by": "ada"}))
        assert moved == {"says": "requests on w1 will move"}
        assert control.asked[1:] == [("move", "w1", "w2", "ada")]
        golden = whole({"act": "approve", "canary_key": "k", "answers": [ANSWER], "by": "ada"})
        assert await bus.request("control.golden", golden) == {"says": "the goldens are to be agreed"}
        brought = (GoldenAnswer(canary="c1", prompt=(1,), tokens=(2,)),)
        assert control.asked[2][1] == GoldenWish(act="approve", canary_key="k", answers=brought)
        status = await bus.request("control.status", {})
        assert status == {"workers": [{"id": "w1", "weight": 0.5, "last_canary": None}], "leader": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "body", "says"),
    [
        ("drain", {}, "worker: Field required"),
        ("drain", {"worker": ""}, "at least 1 character"),
        ("drain", {"worker": "w1", "within": 3}, "within: Extra inputs are not permitted"),
        ("drain", {"worker": "w1", "deadline_s": -3}, "greater than 0"),
        ("resume", {"worker": "w1"}, "w1 is dead"),
        ("move", {"to": "w1"}, "worker: Field required"),
        ("chaos", {"worker": "w1", "fault": "nuke"}, "'kill', 'hang'"),
        ("chaos", {"worker": "w1", "fault": "kill"}, "internal error"),
        ("status", {"verbose": True}, "Extra inputs"),
        ("golden", {"act": "melt", "model": "m"}, "'approve', 'retire' or 'record'"),
        ("golden", {"act": "retire"}, "one of worker, canary_key and model is required"),
        ("golden", {"act": "retire", "worker": "w1"}, "retire accepts a canary key or a model"),
        ("golden", {"act": "record", "model": "m"}, "record requires a worker"),
        ("golden", {"act": "approve", "model": "m", "answers": [ANSWER]}, "act=approve and a canary_key"),
        ("golden", {"act": "approve", "canary_key": "k", "answers": [ANSWER | {"tokens": [-1]}]}, "tokens.0"),
        ("drain", {"worker": "w1", "deadline": "2026-01-01T00:00:00"}, "should have timezone info"),
        ("drain", {"worker": "w1", "id": "a b c d e"}, "should match pattern"),
        ("drain", {"worker": "w1", "id": None}, "id: Input should be a valid string"),
    ],
)
async def test_a_refusal_says_what_was_wrong(
    nats_url: str, verb: str, body: dict[str, Any], says: str
) -> None:
    async with served(nats_url) as (_, bus, _):
        answer = await bus.request(f"control.{verb}", body if verb == "status" else whole(body))
    assert set(answer) == {"error"}
    assert says in answer["error"]


@pytest.mark.parametrize("missing", ["id", "deadline"])
async def test_a_command_without_an_id_or_a_deadline_is_refused(nats_url: str, missing: str) -> None:
    async with served(nats_url) as (control, bus, _):
        body = {name: value for name, value in whole({"worker": "w1"}).items() if name != missing}
        answer = await bus.request("control.drain", body)
    assert answer == {"error": f"the request is not valid: body.{missing}: Field required"}
    assert not control.asked


@pytest.mark.slow
@pytest.mark.parametrize("body", [b"", b"nonsense{", b"[1, 2]", b"\xff\xfe", b"null", b'"w1"'])
async def test_a_body_that_is_no_json_object_is_refused_without_harm(nats_url: str, body: bytes) -> None:
    async with served(nats_url) as (control, bus, _):
        message = await bus.connection.client.request("control.drain", body, timeout=5)
        assert b"error" in message.data
        assert "says" in await bus.request("control.drain", whole({"worker": "w2"}))
    assert [asked[1] for asked in control.asked] == ["w2"]


async def test_two_controllers_receive_each_command_and_only_the_leader_answers(nats_url: str) -> None:
    async with served(nats_url, leads=False) as (one, bus, first), served(nats_url) as (two, _, second):
        for n in range(20):
            answer = await bus.request("control.drain", whole({"worker": f"w{n}"}))
            assert answer == {"says": f"w{n} will drain"}
        assert (await bus.request("control.status", {}))["leader"] is None
    assert (len(first.heard), len(second.heard)) == (20, 20)
    assert (len(one.asked), len(two.asked)) == (0, 20)


async def test_without_a_leader_there_is_no_answer(nats_url: str) -> None:
    async with served(nats_url, leads=False) as (_, bus, gate):
        for verb, body in (("drain", whole({"worker": "w1"})), ("status", {})):
            with pytest.raises(NoAnswer, match="no reply on"):
                await bus.request(f"control.{verb}", body, 0.3)
    assert len(gate.heard) == 1


async def test_it_serves_again_after_the_broker_was_killed(
    own_nats: EmbeddedServer, tmp_path: Any, eventually: Any
) -> None:
    async with served(own_nats.url) as (_, bus, _):
        await own_nats.kill()
        again = await start_nats(tmp_path / "nats", port=own_nats.port)
        try:

            async def answered() -> bool:
                try:
                    return "says" in await bus.request("control.drain", whole({"worker": "w1"}), 0.5)
                except (NoAnswer, BusUnavailable):
                    return False

            await eventually(answered, 20)
        finally:
            await again.kill()


@pytest.mark.parametrize("verb", ["drain", "move", "resume"])
async def test_a_caller_without_permission_gets_an_error_at_once(tmp_path: Path, verb: str) -> None:
    """A refusal by the broker reaches the caller of drain, move and resume, in place of a timeout and a wrong reason."""
    seeds = tmp_path / "seeds"
    users = BrokerUsers(seeds)
    users.make(["w0"])
    server = await start_nats(tmp_path / "nats", users=users.written())
    url = with_keys(server.url, seeds)
    bus = await NatsBus.connect(as_user(url, "reader"), "reader", wait_s=10)
    try:
        journal = await NatsJournal.connect(as_user(url, "controller"), "controller:c1")
        await journal.close()
        async with asyncio.timeout(20), served(as_user(url, "controller")):
            with pytest.raises(
                NotAllowed, match=f"account 'reader' publish to control.{verb}.*holdfast nats permissions"
            ):
                await command(bus, as_user(url, "reader"), verb, {"worker": "w1", "by": "ada"}, 60.0)
    finally:
        await bus.close()
        await server.kill()


async def test_a_caller_that_may_not_receive_answers_gets_an_error_at_once(tmp_path: Path) -> None:
    """A request fails at once where the user may not subscribe to the inbox of its answers."""
    deaf = 'authorization { users = [{ user: u, password: p, permissions: { publish: ">", subscribe: "nothing" } }] }'
    server = await start_nats(tmp_path / "nats", users=deaf)
    bus = await NatsBus.connect(server.url.replace("nats://", "nats://u:p@"), "operator", wait_s=10)
    try:
        async with asyncio.timeout(5):
            with pytest.raises(NotAllowed, match="subscribe to _INBOX"):
                await bus.request("control.drain", {}, 60.0)
    finally:
        await bus.close()
        await server.kill()
