"""The call recorder sees every call between two files, however it is deferred."""

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType

import pytest
from call_recorder import CallRecorder
from waits import turns

CALLER = """
import asyncio

def call(function):
    function()

def lend(run, function):
    run(lambda: function())

def nothing():
    pass

def defer(function):
    asyncio.get_running_loop().call_soon(function)

def defer_for_long(function):
    asyncio.get_running_loop().call_later(0.001, function)

def complete(function):
    future = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: function())
    future.set_result(None)

def begin(coroutine):
    return asyncio.ensure_future(coroutine)

async def in_a_thread(function):
    await asyncio.to_thread(function)

def put(queue):
    queue.put_nowait(1)

def set_event(event):
    event.set()

def set_result(future):
    future.set_result(1)
"""
CALLED = """
def run(function=None):
    if function is not None:
        function()

async def work():
    pass

def left(itself):
    try:
        yield
    finally:
        run()

async def get(queue):
    return await queue.get()

async def wait(event):
    await event.wait()

async def result(future):
    return await future
"""


@pytest.fixture
def modules(tmp_path: Path) -> list[ModuleType]:
    """Two files: the first one calls the second one."""
    made: list[ModuleType] = []
    for name, source in (("caller", CALLER), ("called", CALLED)):
        path = tmp_path / "ours" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        made.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(made[-1])
    return made


async def _queue(a: ModuleType, b: ModuleType) -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    getting = asyncio.ensure_future(b.get(queue))
    await turns()
    a.put(queue)
    await getting


async def _queue_later(a: ModuleType, b: ModuleType) -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    a.put(queue)
    await b.get(queue)


async def _event(a: ModuleType, b: ModuleType) -> None:
    event = asyncio.Event()
    waiting = asyncio.ensure_future(b.wait(event))
    await turns()
    a.set_event(event)
    await waiting


async def _future(a: ModuleType, b: ModuleType) -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(b.result(future))
    await turns()
    a.set_result(future)
    await waiting


async def _plainly(a: ModuleType, b: ModuleType) -> None:
    a.call(b.run)


async def _by_lambda(a: ModuleType, b: ModuleType) -> None:
    a.lend(b.run, b.run)


async def _back_by_lambda(a: ModuleType, b: ModuleType) -> None:
    a.lend(b.run, a.nothing)


async def _soon(a: ModuleType, b: ModuleType) -> None:
    a.defer(b.run)


async def _later(a: ModuleType, b: ModuleType) -> None:
    a.defer_for_long(b.run)


async def _completed(a: ModuleType, b: ModuleType) -> None:
    a.complete(b.run)


async def _task(a: ModuleType, b: ModuleType) -> None:
    await a.begin(b.work())


async def _thread(a: ModuleType, b: ModuleType) -> None:
    await a.in_a_thread(b.run)


FORTH, BACK = ("ours/caller.py", "ours/called.py"), ("ours/called.py", "ours/caller.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "edges"),
    [
        (_plainly, {FORTH}),
        (_by_lambda, {FORTH}),
        (_back_by_lambda, {FORTH, BACK}),
        (_soon, {FORTH}),
        (_later, {FORTH}),
        (_completed, {FORTH}),
        (_task, {FORTH}),
        (_thread, {FORTH}),
        (_queue, {FORTH}),
        (_queue_later, {FORTH}),
        (_event, {FORTH}),
        (_future, set()),  # it returns
    ],
)
async def test_a_call_is_recorded_however_it_is_deferred(
    modules: list[ModuleType],
    tmp_path: Path,
    act: Callable[[ModuleType, ModuleType], Awaitable[None]],
    edges: set[object],
) -> None:
    with CallRecorder(tmp_path, ["ours"]).installed() as recorder:
        async with recorder.recording() as way:
            await act(*modules)
    assert set(way.edges) == edges
    assert way.pairs == ([BACK] if BACK in edges else [])


async def test_a_timer_set_before_the_recording_runs_after_it(
    modules: list[ModuleType], tmp_path: Path
) -> None:
    called = modules[1]
    runs: list[bool] = []

    def rings() -> None:
        called.run()
        runs.append(True)

    with CallRecorder(tmp_path, ["ours"]).installed() as recorder:
        asyncio.get_running_loop().call_later(0.001, rings)
        async with recorder.recording() as way:
            pass
        assert not way.files
        await turns()
    assert runs == [True]


async def test_closing_by_the_garbage_collector_is_not_a_call(
    modules: list[ModuleType], tmp_path: Path
) -> None:
    called = modules[1]

    def leave() -> None:
        """Leave a suspended generator in a cycle, as a finished test does."""
        cycle: list[object] = []
        generator = called.left(cycle)
        next(generator)
        cycle.append(generator)

    with CallRecorder(tmp_path, ["ours"]).installed() as recorder:
        leave()
        async with recorder.recording() as way:
            garbage = [[0] for _ in range(100_000)]  # a collection is due
            garbage.append(garbage)  # type: ignore[arg-type]
            del garbage
        assert not way.files
