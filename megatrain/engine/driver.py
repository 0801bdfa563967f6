"""Two calls of the CUDA driver that PyTorch does not offer.

`copy` enqueues a copy between addresses that are known to be pinned, with nothing looked up. `Flag` is a word of pinned memory
that the host writes and streams wait for: a stream can so be told to wait for work of the host before that work is done, which an
event cannot (waiting for one that was not recorded waits for nothing). Both return at once.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import torch

_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ: as a signed difference, so a count may wrap round
_MOST_PENDING = 1 << 30


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    address, stream = ctypes.c_uint64, ctypes.c_void_p
    library.cuMemcpyAsync.argtypes = [address, address, ctypes.c_size_t, stream]
    library.cuStreamWaitValue32_v2.argtypes = [stream, address, ctypes.c_uint32, ctypes.c_uint]
    return library


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy between device memory and pinned host memory, by address. RuntimeError if the driver refuses."""
    error = _driver().cuMemcpyAsync(target, source, nbytes, stream)
    if error:
        raise RuntimeError(f"copy of {nbytes} bytes: CUDA driver error {error}")


class Flag:
    """A count that the host raises and streams wait for."""

    def __init__(self) -> None:
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._value = self._word.numpy().view(np.uint32)
        self.address = self._word.data_ptr()
        self._count, self._abandoned = 0, False

    def follow(self, stream: int, count: int) -> bool:
        """Make `stream` wait until the count is at least `count`; False where streams cannot wait for memory."""
        return int(_driver().cuStreamWaitValue32_v2(stream, self.address, count & 0xFFFFFFFF, _GREATER_OR_EQUAL)) == 0

    def set(self, count: int) -> None:
        self._count = count
        self._value[0] = count & 0xFFFFFFFF
        if self._abandoned:  # looked at last: it may have happened meanwhile
            self.abandon()

    def abandon(self) -> None:
        """Let everything pass that waits or will: the run has failed or ended."""
        self._abandoned = True
        self._value[0] = (self._count + _MOST_PENDING) & 0xFFFFFFFF
