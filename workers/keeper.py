"""Starts the keeper, a second process that lets the kernel close a killed worker's sockets at once.

    without   SIGKILL ─▶ memory freed, page by page ─▶ sockets closed ─▶ ended
    with      SIGKILL ─▶ sockets closed ─▶ ended
                                             └─ 0.1 s ─▶ the keeper ends ─▶ memory freed

The diagram shows what happens after a SIGKILL, without and with a keeper. Frontends move the streams of a dead worker when
their connections to it end. The kernel frees a dying process's memory before it closes the sockets (`exit_mm` before
`exit_files` in Linux's do_exit). Freeing takes 6 ms for a small worker, 50 ms with torch loaded, and 140 ms for a gigabyte. The
kernel frees the memory only when the last process that uses it ends, so a second process with the same memory avoids the delay.

The keeper is a `clone` with CLONE_VM as the only flag: a process that shares the worker's memory and has a copy of the worker's
descriptors. The keeper runs no Python, because the interpreter belongs to the worker. The keeper calls a few libc functions,
one after the other, on separate stacks (makecontext). The calls close all descriptors except one, a pidfd of the worker, and
wait until the worker has ended for any reason.

The keeper waits on a pidfd, which reports the worker's end only after the last thread has closed its last file. Two
alternatives would be too early: PDEATHSIG arrives when one thread ends, and the end of a pipe while the sockets are still being
closed. The keeper blocks every signal that can be blocked. A plain `wait` by the worker ignores the keeper.
"""

import ctypes
import os
import select
import signal
import struct
import sys

import structlog

from events.errors import HoldfastError

NAME = b"holdfast-keeper"  # shown by ps and top; at most 15 bytes
READY_WITHIN_S = 1.0
# microseconds; lets the worker's streams migrate before memory is freed on the same core
FREED_AFTER_US = 100_000
MACHINES = ("x86_64",)  # tested architectures, on which libc's contexts start like _Context
_CLONE_VM = 0x100
_PR_SET_NAME = 15
_WALL = 0x40000000  # waitpid option: also wait for a child that sends no SIGCHLD
_CALL_BYTES = 32768

log = structlog.get_logger(__name__)


class NoKeeper(HoldfastError):
    """This process has no keeper: its connections end when its memory is freed."""


class _Context(ctypes.Structure):
    """The first fields of glibc's ucontext_t, and space for the rest."""

    _fields_ = (
        ("flags", ctypes.c_ulong),
        ("next", ctypes.c_void_p),
        ("stack", ctypes.c_void_p),
        ("stack_flags", ctypes.c_int),
        ("stack_bytes", ctypes.c_size_t),
        ("rest", ctypes.c_char * 8192),
    )


def keep(libc: ctypes.CDLL | None = None) -> int | None:
    """Start this process's keeper and return the keeper's pid; None if a keeper cannot be started.

    Call this function once, before the process has other threads or sockets. A keeper that is killed later is therefore not
    replaced.
    """
    try:
        return start(libc)
    except NoKeeper as reason:
        log.info("no_keeper", reason=str(reason))
        return None


def ended(pid: int) -> bool:
    """Return True if the keeper `pid` has ended, and reap it.

    Return False while the keeper runs, and in every call after the keeper was reaped.
    """
    try:
        return os.waitpid(pid, os.WNOHANG | _WALL)[0] == pid
    except ChildProcessError:
        return False


def start(libc: ctypes.CDLL | None = None) -> int:
    """Start a keeper with the functions of `libc` (default: the libc of this process) and return the keeper's pid.

    Raise NoKeeper if the platform does not support a keeper or a system call fails.
    """
    if sys.platform != "linux" or os.uname().machine not in MACHINES:
        raise NoKeeper(f"not supported on {sys.platform} ({os.uname().machine})")
    libc = libc or ctypes.CDLL(None, use_errno=True)
    try:
        worker = os.pidfd_open(os.getpid())
        try:
            return _start(libc, worker)
        finally:
            os.close(worker)
    except AttributeError as error:
        raise NoKeeper(f"not supported by this libc: {error}") from error
    except OSError as error:
        raise NoKeeper(str(error)) from error


def _start(libc: ctypes.CDLL, worker: int) -> int:
    # fails on kernels before 5.9, which have no close_range
    _check(libc.close_range(ctypes.c_uint(1 << 30), ctypes.c_uint(1 << 30), 0), "close_range")
    ready, unready = os.pipe()
    try:
        try:
            pid = _clone(libc, worker)
        finally:
            os.close(unready)
        # the pipe is readable at its end of file, which means that the keeper has closed its copy of `unready`
        ready_to_read, _, _ = select.select([ready], [], [], READY_WITHIN_S)
    finally:
        os.close(ready)
    if ready_to_read and os.waitpid(pid, os.WNOHANG | _WALL) == (0, 0):
        return pid
    if not ready_to_read:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, _WALL)
    raise NoKeeper("the keeper process did not start")


def _clone(libc: ctypes.CDLL, worker: int) -> int:
    """Start the keeper process and return its pid. All signals are blocked during the call, and stay blocked in the keeper."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        context, stack = _write_calls(libc, worker)
        return _check(libc.clone(libc.setcontext, stack, _CLONE_VM, context), "clone")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write_calls(libc: ctypes.CDLL, worker: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """Write the keeper's sequence of libc calls into memory that is never freed.

    Return the address of the first call's context, and the top of the stack on which the keeper starts.
    """
    libc.calloc.restype = ctypes.c_void_p
    name = _copy(libc, NAME + b"\0")
    pollfd = _copy(libc, struct.pack("ihh", 0, select.POLLIN, 0))
    calls = (
        (libc.prctl, (_PR_SET_NAME, name)),
        (libc.dup2, (worker, 0)),
        (libc.close_range, (1, 0xFFFFFFFF, 0)),
        (libc.poll, (pollfd, 1, -1)),  # until the worker has ended
        (libc.usleep, (FREED_AFTER_US,)),
        (libc._exit, (0,)),
    )
    start = _allocate(libc, (len(calls) + 1) * _CALL_BYTES)
    for number, (function, arguments) in enumerate(calls):
        address = start + number * _CALL_BYTES
        context = _Context.from_address(address)
        _check(libc.getcontext(ctypes.byref(context)), "getcontext")
        context.next = address + _CALL_BYTES
        context.stack = address + ctypes.sizeof(_Context)
        context.stack_bytes = _CALL_BYTES - ctypes.sizeof(_Context)
        words = (ctypes.c_long(argument) for argument in arguments)
        libc.makecontext(ctypes.byref(context), function, len(arguments), *words)
    return ctypes.c_void_p(start), ctypes.c_void_p(start + (len(calls) + 1) * _CALL_BYTES)


def _copy(libc: ctypes.CDLL, text: bytes) -> int:
    address = _allocate(libc, len(text))
    ctypes.memmove(address, text, len(text))
    return address


def _allocate(libc: ctypes.CDLL, size: int) -> int:
    address = libc.calloc(1, ctypes.c_size_t(size))
    if not address:
        raise OSError("cannot allocate memory for the keeper")
    return int(address)


def _check(result: int, call: str) -> int:
    if result == -1:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")
    return result
