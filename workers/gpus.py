"""Applies GPU faults to one worker: distrusts its results, or ends the worker if a GPU has died."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from events.journal.port import Journal
from workers.config.worker import WorkerConfig
from workers.output import StreamOutput
from workers.shutdown import WorkerEnd
from workers.worker_failures import Broken, broken

DEVICES_S_MAX = 10.0  # the driver's own startup; later calls wait no longer


class Devices(Protocol):
    """The devices of one worker and their faults: a `DeviceWatch`, or `SimulatedDevices`.

    Declared here with untyped reported values, so that a single simulated rank avoids the imports.
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
    """The GPUs of one worker, if it has any."""

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
        """The GPUs that the worker registers."""
        return self._devices.gpus if self._devices is not None else ()

    async def find(self, *, loaded: bool) -> None:
        """Find this worker's GPUs: configured ones before the weights are loaded, detected ones afterwards.

        Raise UnknownGpus if a configured GPU does not exist.
        """
        if self._devices is not None and self._devices.named is not loaded:
            await asyncio.to_thread(self._devices.start, DEVICES_S_MAX)

    def watch(self) -> None:
        """Report device faults from now on."""
        if self._devices is not None:
            from workers.devices.report import report

            report(
                self._devices,
                self._journal,
                self._config.name,
                self._config.instance,
                doubt=self._distrust,
                died=self._end_with_gpu,
                broke=lambda error: self._end.fail(broken("the device watch", error)),
            )

    def stop(self) -> None:
        """Stop reporting."""
        if self._devices is not None:
            self._devices.stop()

    def _distrust(self, reason: str) -> None:
        """Ship no KV cache while any GPU has a fatal fault."""
        if reason:
            self._output.distrust("device", f"the source is not trusted: {reason}")
        else:
            self._output.regain("device")

    def _end_with_gpu(self, reason: str) -> None:
        """End the worker because a GPU of its engine died: nothing in the GPU's memory can be trusted any more."""
        if self._config.computes_on_gpus:
            self._end.fail(Broken(reason))
