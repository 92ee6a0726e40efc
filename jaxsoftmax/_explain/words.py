"""The explanation of a call and of a program, and the words for bytes and times."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.hardware import Device


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Says how a call runs; `str()` says it in words.

    Attributes:
        call: The operation, its operand and its axes.
        implementation: "mosaic_gpu", "cudnn" or "xla" on `device`, or "error" where a named kernel declines.
        here: Whether `device` is a device of this process; if not, XLA's reference runs here.
        device: The GPU explained for.
        reason: Why this kernel, or why none.
        least_bytes: The bytes that any implementation must read and write: each operand and result once.
        notes: Copies and other work outside the kernel.
        declined: (kernel, why not), in the ladder's order.
        kernel: The name of the kernel, or None.
        config: The kernel's configuration, or None.
        bytes_moved: The bytes that the kernel reads and writes in global memory, or None.
        function: The public function that is called.
        direction: "forward", "vjp" (reverse mode), "jvp" (forward mode), or "forward and vjp" where one kernel writes
            both. The derivatives of softmax in either mode are one computation, which is called "vjp".
        operands: The types of the operands, as "bfloat16[8192,4096]".
        flop: The operations of the matrix products, or None where there are none, or where data decide how many.
        times: How often a run of the program makes the call; None where data decide it, in a `while` loop or a branch.
        site: The file and line of the call in a program, as "model.py:31".
        verbose: Whether `str()` shows the configuration.
    """

    call: str
    implementation: str
    here: bool
    device: Device
    reason: str
    least_bytes: int
    notes: tuple[str, ...] = ()
    declined: tuple[tuple[str, str], ...] = ()
    kernel: str | None = None
    config: object = None
    bytes_moved: int | None = None
    function: str = ""
    direction: str = "forward"
    operands: tuple[str, ...] = ()
    flop: int | None = None
    times: int | None = 1
    site: str = ""
    verbose: bool = False

    @property
    def seconds(self) -> float | None:
        """Estimates how long one call takes at the rates that the card reaches, without launches; None if unknown."""
        return self._bound[0] if self._bound else None

    @property
    def _bound(self) -> tuple[float, str] | None:
        """Returns the time, and the rate that bounds the time, in words."""
        rates = self.device.rates
        if rates is None or self.implementation == "error" or not isinstance(self.least_bytes, int):
            return None
        by_bytes = max(self.bytes_moved or 0, self.least_bytes) / rates.bytes_per_s
        by_flop = (self.flop or 0) / rates.flop_per_s
        if by_flop > by_bytes:
            return by_flop, f"{rates.flop_per_s / 1e12:.0f} TFLOP/s"
        return by_bytes, f"{rates.bytes_per_s / 1e12:.1f} TB/s"

    def __str__(self) -> str:
        lines = [self.call]
        if not self.here:
            lines.append("  here: no CUDA device, so XLA runs the reference")
        return "\n".join([*lines, f"  on {self.device.name}: {self.runs}", *self.details(declined=True)])

    @property
    def runs(self) -> str:
        """Says in words which implementation runs the call."""
        config = f", {self.config}" if self.verbose and self.config is not None else ""
        return {
            "mosaic_gpu": f"kernel {self.kernel}{config}",
            "cudnn": "cuDNN",
            "xla": "XLA runs the reference",
            "error": "an error, for the implementation was named",
        }[self.implementation]

    def details(self, declined: bool) -> list[str]:
        """Returns the lines after it, with those on kernels that declined if asked for."""
        lines, least = [f"    why: {self.reason}"], size_in_words(self.least_bytes)
        if self.bytes_moved is None:
            lines.append(f"    moves: nothing can move less than {least}")
        else:
            lines.append(
                f"    moves: {size_in_words(self.bytes_moved)} by the kernel; the whole call no less than {least}"
            )
        if self._bound and self._bound[0] < 1e-6:
            lines.append("    takes: less than a microsecond, beside its launches")
        elif self._bound:
            is_copy = self.kernel is not None and self._bound[1].endswith("TB/s")
            about = "about" if is_copy else "at least"
            products = "" if self.flop is None else f", for products of {self.flop / 1e9:.4g} GFLOP"
            lines.append(f"    takes: {about} {time_in_words(self._bound[0])} at {self._bound[1]}{products}")
        lines += [f"    besides: {note}" for note in self.notes]
        return lines + [f"    not {name}: {why}" for name, why in self.declined if declined]


class Outside(NamedTuple):
    """Names a function that this package can replace, and where a program calls that, as "model.py:31"."""

    function: str
    site: str


@dataclasses.dataclass(frozen=True)
class ProgramExplanation:
    """Lists the plans of this package's calls in a program; `str()` says them in words.

    Attributes:
        device: The GPU explained for.
        here: Whether `device` is a device of this process.
        calls: The calls, in the order of the program; equal ones from one line are one, with their number as `times`.
        outside: The calls of `jax.nn`, `jax.scipy.special`, optax and Flax that this package has functions for.
    """

    device: Device
    here: bool
    calls: tuple[Explanation, ...]
    outside: tuple[Outside, ...]

    @property
    def seconds(self) -> float:
        """Adds up the calls' times that are known, but of no call for which data decide how often it runs."""
        return sum((call.seconds or 0.0) * (call.times or 0) for call in self.calls)

    def __str__(self) -> str:
        here = "" if self.here else "; here: no CUDA device, so XLA runs the references"
        lines = [f"on {self.device.name}{here}"]
        for call in self.calls:
            times = "in a loop or branch, " if call.times is None else f"{call.times} times, " if call.times > 1 else ""
            lines += [f"  {call.call} ({times}{call.site})" if call.site else f"  {call.call}"]
            lines += [f"    {call.runs}", *call.details(call.verbose or call.kernel is None)]
        if not self.calls:
            lines.append("  no call of jaxsoftmax")
        elif self.device.rates is not None:
            lines.append(f"  all of these: no less than {time_in_words(self.seconds)}")
        lines += [
            f"  outside: {function} at {site}; jaxsoftmax.patch() would take it" for function, site in self.outside
        ]
        return "\n".join([*lines, "  not seen: softmax written by hand, and what other libraries' kernels do"])


def size_in_words(count: int) -> str:
    """Says bytes in words; `count` is symbolic too where shapes are."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if isinstance(count, int) and count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def time_in_words(seconds: float) -> str:
    unit, factor = next(((u, f) for u, f in (("s", 1.0), ("ms", 1e3)) if seconds * f >= 1), ("us", 1e6))
    return f"{seconds * factor:.3g} {unit}"
