"""Memory: one fixed arena on the device, one buffer for each host storage.

Everything a schedule names has its place before the first step. `bind` turns an access into a view of those bytes, and
`located` turns a view back into (storage, first byte, end byte) by its address: that is what a measured trace records, so binding
the wrong bytes shows whatever the schedule said.

Memory starts filled with 0xFF, which is NaN in BF16 and FP32: bytes that were never written cannot pass for zeros.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Mapping

import torch
from torch import Tensor

from megatrain.engine.backend import BoundRange
from megatrain.layers.saved import alias
from megatrain.schedule.nouns import Access, Schedule, Storage

ALIGN_NBYTES = 256


class Memory:
    """The bytes of a schedule's storages. Dynamic storages (saved activations) have none here: they are opaque handles.

    `adopted` are host buffers by storage name, from another schedule's memory: a host storage of that name and size takes it.
    """

    def __init__(self, storages: tuple[Storage, ...], device: str = "cpu", adopted: Mapping[str, Tensor] | None = None) -> None:
        self.storages = storages
        self._arena = buffer(sum(_round_up(s.nbytes) for s in storages if s.space == "device" and not s.dynamic), device)
        self._views: list[Tensor | None] = []
        at = 0
        for storage in storages:
            if storage.dynamic:
                self._views.append(None)
            elif storage.space == "device":
                self._views.append(self._arena[at : at + storage.nbytes])
                at += _round_up(storage.nbytes)
            else:
                there = (adopted or {}).get(storage.name)
                fits = there is not None and there.numel() == storage.nbytes
                self._views.append(there if fits else buffer(storage.nbytes, "cpu"))
        self._by_address = sorted((view.data_ptr(), i) for i, view in enumerate(self._views) if view is not None and view.numel())
        self._addresses = [address for address, _ in self._by_address]
        self._index = {s.name: i for i, s in enumerate(storages)}

    def bind(self, access: Access) -> Tensor:
        """The bytes of `access`: uint8 [stop - start]. Copies nothing.

        The tensor is no view of the arena to autograd: views share a version counter, and writing one storage would then count
        as a change of what an op saved from another.
        """
        view = self._views[access.storage]
        if view is None:
            raise ValueError(f"{self.storages[access.storage].name}: a dynamic storage has no bytes to bind")
        at = int(view.storage_offset()) + access.start
        return alias(view, torch.uint8, at, (access.stop - access.start,), (1,))

    def located(self, view: Tensor) -> BoundRange:
        """Where a view lies, by its address."""
        address = view.data_ptr()
        base, i = self._by_address[bisect_right(self._addresses, address) - 1]
        return self.storages[i].name, address - base, address - base + view.numel() * view.element_size()

    def named(self, name: str) -> Tensor:
        """All bytes of a storage, by name. KeyError if the schedule has none of that name."""
        view = self._views[self._index[name]]
        if view is None:
            raise ValueError(f"{name}: a dynamic storage has no bytes to bind")
        return view

    def __contains__(self, name: str) -> bool:
        return name in self._index


def buffer(nbytes: int, device: str) -> Tensor:
    """`nbytes` of 0xFF that start at a multiple of `ALIGN_NBYTES`: the bits of a kernel can depend on alignment."""
    raw = torch.empty(nbytes + ALIGN_NBYTES, dtype=torch.uint8, device=device)
    if device == "cpu":
        _ask_for_large_pages(raw)
    raw.fill_(0xFF)
    skip = -raw.data_ptr() % ALIGN_NBYTES
    return raw[skip : skip + nbytes]


LARGE_PAGE_NBYTES = 2 << 20


def _ask_for_large_pages(untouched: Tensor) -> None:
    """Ask the system to back memory by pages of 2 MiB: there are 512 times fewer to fault in and to register with a driver. Where
    it cannot, nothing happens."""
    advice: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
    start = _round_up(untouched.data_ptr(), LARGE_PAGE_NBYTES)
    nbytes = (untouched.data_ptr() + untouched.numel() - start) // LARGE_PAGE_NBYTES * LARGE_PAGE_NBYTES
    if advice is not None and nbytes > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), advice)


def _round_up(nbytes: int, to: int = ALIGN_NBYTES) -> int:
    return -(-nbytes // to) * to


def device_nbytes(schedule: Schedule) -> int:
    """Bytes of the arena a schedule needs on the cpu backend."""
    return sum(_round_up(s.nbytes) for s in schedule.storages if s.space == "device" and not s.dynamic)
