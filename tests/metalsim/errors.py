"""The one error of the simulator."""

from __future__ import annotations


class MetalError(RuntimeError):
    """A kernel does not compile, or breaks a rule of Metal's memory or execution model.

    The message names the kernel, the thread, buffer[index], and the source line with its text.
    """
