"""Lists the faults that a GPU can report, each with NVIDIA's meaning and the action of Holdfast.

    fatal      the worker becomes UNHEALTHY at once, and its streams continue on other workers
    nvlink     a worker with several GPUs gets no new requests until repair; a warning for a worker with one GPU
    throttle   the worker's share of traffic is reduced to the GPU's clock divided by the normal clock
    warning    the fault is only recorded on the journal

An Xid is an error event, which the NVIDIA driver reports once. A fatal or NVLink Xid stays active until a repair is detected.
Each of these counts as a repair: a lost GPU has returned, the driver has withdrawn its recovery action, or the count of
volatile errors has dropped. The fault of a warning Xid ends after 300 s without another warning Xid. Faults that are not Xids
(LEVELS) begin and end by values that the device watch reads repeatedly.

Meanings: NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html). An Xid is fatal if the catalog
says RESET_GPU, RESTART_VM or RESTART_BM, or if the Xid only gives details of another fatal Xid. RESTART_APP and IGNORE are
warnings, because an affected engine reports the error itself. Xid 94 is an exception and counts as fatal, because the lost
memory may hold the weights, and no report identifies the memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Action = Literal["fatal", "nvlink", "throttle", "warning"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """NVIDIA's meaning of one GPU fault, and the action of Holdfast."""

    text: str
    action: Action


def _all(action: Action, **texts: str) -> dict[int, Meaning]:
    return {int(code.removeprefix("x")): Meaning(text, action) for code, text in texts.items()}


XIDS: Mapping[int, Meaning] = {
    **_all(
        "fatal",
        x46="the GPU stopped answering: timeout",
        x48="double-bit ECC error, not correctable",
        x62="the power management unit halted",
        x64="a bad memory row could not be recorded for remapping",
        x79="the GPU has fallen off the bus",
        x94="uncorrectable memory error, contained: the application that was hit must be restarted",
        x95="uncorrectable memory error, not contained: the GPU must be reset",
        x109="context switch timeout",
        x110="fault of the security engine",
        x119="the GPU system processor (GSP) did not answer",
        x120="the GPU system processor (GSP) failed",
        x136="link training failed",
        x140="unrecovered ECC error",
        x143="the GPU could not be initialised",
        x151="confidential computing: the rotation of keys failed, the virtual machine must be restarted",
        x155="NVLink error that software defines: the GPU must be reset",
        x156="a hardware resource was retired: the GPU must be reset",
        x158="fatal timeout",
        x171="details of a double-bit ECC error (48): of the memory (DRAM)",
        x172="details of a double-bit ECC error (48): inside the chip (SRAM)",
    ),
    **_all(
        "nvlink",
        x74="NVLink error",
        x144="NVLink: error of the sharing and address unit (SAW)",
        x145="NVLink: error of the reliability unit (RLW)",
        x146="NVLink: error of the transaction unit (TLW)",
        x147="NVLink: error of the exchange unit (TREX)",
        x148="NVLink: error of the power control (NVLPW_CTRL)",
        x149="NVLink: error of the network interface (NETIR)",
        x150="NVLink: error of the management unit (MSE)",
    ),
    **_all(
        "warning",
        x8="the GPU stopped processing: the application's channel timed out",
        x13="graphics engine exception, mostly the application's: an access out of bounds, an illegal instruction",
        x31="memory page fault, mostly the application's: an illegal address",
        x32="invalid or corrupted push buffer of the application",
        x43="the GPU stopped processing the application's channel; the GPU itself is well",
        x45="channels removed beforehand: an application ended, or an earlier error is being cleaned up",
        x54="auxiliary power is missing: clocks are reduced",
        x63="a bad memory row is recorded for remapping at the next reset",
        x92="many correctable (single-bit) ECC errors",
        x121="error of the chip-to-chip link (C2C), corrected",
        x137="NVLink: an access failed at the far end",
        x154="the recovery action that the driver recommends has changed",
        x157="a hardware resource could not be retired",
    ),
}
UNKNOWN_XID = Meaning("not in this table", "warning")

XID_CLASSES: Mapping[Action, str] = {
    "fatal": "xid",
    "nvlink": "xid_nvlink",
    "warning": "xid_warning",
}
"""The fault class of an Xid, by the Xid's action. Xids that are repaired together have the same class. The end of a warning does
not end a more severe fault, which is in another class."""

LEVELS: Mapping[str, Meaning] = {
    "lost": Meaning("the GPU no longer answers: the GPU or its driver is lost", "fatal"),
    "ecc": Meaning("new uncorrectable (volatile) ECC errors since the watch began", "fatal"),
    "row_remap_failure": Meaning("a bad memory row could not be remapped: replace the GPU", "fatal"),
    "recovery": Meaning("the driver recommends resetting the GPU or rebooting the node", "fatal"),
    "nvlink_down": Meaning("an NVLink that was up is down", "nvlink"),
    "throttle": Meaning(
        "clocks are reduced by heat (thermal) or by the power supply (power_brake)", "throttle"
    ),
    "row_remap_pending": Meaning("a bad memory row will be remapped at the next reset", "warning"),
    "nvlink_errors": Meaning("NVLink replays or recoveries are being counted", "warning"),
    "pcie_width": Meaning("the PCIe link is narrower than the GPU and its slot allow", "warning"),
    "temperature": Meaning("the GPU has reached its slowdown temperature", "warning"),
}


def xid_meaning(code: int) -> Meaning:
    """Return the meaning of the Xid `code`. An Xid that is not in the table counts as a warning."""
    return XIDS.get(code, UNKNOWN_XID)


def meaning(fault_class: str, code: str) -> str:
    """Return the text that describes a fault of this class and code. For an Xid, `code` is its number."""
    if fault_class in XID_CLASSES.values():
        return f"Xid {code}, {xid_meaning(int(code)).text}"
    return f"{LEVELS[fault_class].text}{f' ({code})' if code else ''}"
