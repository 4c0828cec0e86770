"""What does the state of its GPUs mean for a worker? What they hold may not be trusted, or it must go with one that died."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from events.journal.port import Journal
from workers.config.worker import WorkerConfig
from workers.falls import Broken, broken
from workers.output import StreamOutput
from workers.shutdown import WorkerEnd

DEVICES_S_MAX = 10.0  # the driver's own start; later it is waited for no longer


class Devices(Protocol):
    """The devices of one worker, and what is wrong with them: a `DeviceWatch`, or `SimulatedDevices`.

    Named here, and what they say left open, because a lone simulated rank does without the imports.
    """

    @property
    def named(self) -> bool: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def gpus(self) -> tuple[str, ...]: ...
    def start(self, within_s: float) -> None: ...
    def begin(
        self, say: Callable[[str, Any], None], broke: Callable[[Exception], None] | None = None
    ) -> None: ...
    def stop(self) -> None: ...
    def play(self, fault: str, argument: float, rank: int) -> bool: ...
    def mend(self, fault: str, argument: float, rank: int) -> None: ...


class WorkerGpus:
    """The GPUs of one worker, where it has any."""

    def __init__(
        self,
        config: WorkerConfig,
        devices: Devices | None,
        journal: Journal,
        output: StreamOutput,
        end: WorkerEnd,
    ) -> None:
        self._config = config
        self._devices = devices
        self._journal = journal
        self._output = output
        self._end = end

    @property
    def uuids(self) -> tuple[str, ...]:
        """Those that it is registered with."""
        return self._devices.gpus if self._devices is not None else ()

    async def find(self, *, loaded: bool) -> None:
        """Find this worker's GPUs: those that were named before the weights are loaded, those that are used after.

        Raise UnknownGpus if some were named that are not there.
        """
        if self._devices is not None and self._devices.named is not loaded:
            await asyncio.to_thread(self._devices.start, DEVICES_S_MAX)

    def watch(self) -> None:
        """Report from now on what is wrong with them."""
        if self._devices is not None:
            from workers.devices.report import report

            report(
                self._devices,
                self._journal,
                self._config.name,
                self._config.instance,
                doubt=self._doubt,
                died=self._died,
                broke=lambda error: self._end.fail(broken("the device watch", error)),
            )

    def stop(self) -> None:
        """Report no more."""
        if self._devices is not None:
            self._devices.stop()

    def _doubt(self, reason: str) -> None:
        """Send no KV cache from a GPU that has a fatal fault, until none has."""
        if reason:
            self._output.distrust("device", f"the source is not trusted: {reason}")
        else:
            self._output.regain("device")

    def _died(self, reason: str) -> None:
        """Go with a GPU that the engine computes on: nothing that is in its memory can be trusted any more."""
        if self._config.computes_on_gpus:
            self._end.fail(Broken(reason))
