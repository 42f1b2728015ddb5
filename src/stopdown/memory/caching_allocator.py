"""Simulation of PyTorch's caching allocator for CUDA, ROCm and XPU: the memory it reserves.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with default settings, for one stream:

- A size is rounded up to 512 bytes. Up to 1 MiB it comes from the small pool, else from the large one.
- The smallest free block that is large enough is used. It is split if the remainder is at least 512
  bytes in the small pool, or more than 1 MiB in the large pool; else it is handed out whole.
- If no block is large enough, a segment is requested from the driver: 2 MiB for the small pool, 20 MiB
  for sizes below 10 MiB, else the size rounded up to 2 MiB.
- Free neighbours are merged within a segment, never across segments.
- Nothing is returned to the driver until memory runs out; then all empty segments are.

With `expandable`, each pool is one segment that grows by pages of 2 or 20 MiB, every remainder stays
free, and empty pages are returned. Here their holes aren't filled again; the segment grows instead.

Not covered: several streams, `max_split_size_mb` and other settings, and memory that the driver takes
for itself (context, kernels).
"""

from __future__ import annotations

import bisect
import itertools

from stopdown.devices.device_profiles import Profile

BLOCK_BYTES = 512
SMALL_BYTES = 2**20
SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
LARGE_BYTES = 10 * 2**20

WORKSPACE_BYTES = (4096 * 2 + 16 * 8) * 1024
"""Bytes of cuBLAS's workspace, kept from the first product on (`CUBLAS_WORKSPACE_CONFIG` `:4096:2:16:8`,
the default)."""

HOPPER_WORKSPACE_BYTES = 4096 * 8 * 1024
"""Bytes of cuBLAS's workspace on compute capability 9.0 (`:4096:8`)."""


def find_workspace(profile: Profile) -> int | None:
    """Return the bytes of cuBLAS's workspace on a device; None if the device's allocator isn't modelled.

    The allocators of ROCm and XPU follow CUDA's rules. MPS's doesn't, and the CPU's reserves nothing.
    """
    if profile.kind in ("cpu", "mps"):
        return None
    return HOPPER_WORKSPACE_BYTES if profile.number == (9, 0) else WORKSPACE_BYTES


class OutOfMemory(Exception):
    """Raised if an allocation would exceed the simulated allocator's limit."""


def round_size(nbytes: int) -> int:
    """Round a request in bytes up to the size of its block."""
    return max(BLOCK_BYTES, -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES)


def size_segment(size: int) -> int:
    """Return the size of the segment to request from the driver for a block of `size` bytes."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES


class Block:
    """A contiguous part of a segment, linked to its neighbours."""

    __slots__ = ("after", "before", "is_free", "place", "pool", "size", "start")

    def __init__(self, pool: Pool, place: int, start: int, size: int) -> None:
        """Make a block in use, without neighbours.

        Args:
            place: number of its segment, counted over all segments ever allocated.
            start: byte offset in the segment.
        """
        self.pool, self.place, self.start, self.size = pool, place, start, size
        self.before: Block | None = None
        self.after: Block | None = None
        self.is_free = False

    @property
    def key(self) -> tuple[int, int, int]:
        """The sort key of free blocks: size, then address."""
        return self.size, self.place, self.start


class Pool:
    """The free blocks of one size class, small or large.

    Attributes:
        least_rest: a block is split if at least so many bytes would be left over.
        page: bytes by which an expandable segment grows.
        keys: sort keys of the free blocks, ascending.
        last: the last block of an expandable segment.
    """

    def __init__(self, least_rest: int, page: int) -> None:
        self.least_rest, self.page = least_rest, page
        self.keys: list[tuple[int, int, int]] = []
        self.blocks: dict[tuple[int, int, int], Block] = {}
        self.last: Block | None = None

    def put(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self.keys, block.key)
        self.blocks[block.key] = block

    def take(self, block: Block) -> None:
        del self.keys[bisect.bisect_left(self.keys, block.key)]
        del self.blocks[block.key]
        block.is_free = False

    def count_pages(self, size: int) -> int:
        """Return the bytes to map, in whole pages, so that a block fits at an expandable segment's end."""
        there = self.last.size if self.last is not None and self.last.is_free else 0
        return -(-(size - there) // self.page) * self.page

    def find(self, size: int) -> Block | None:
        """Return the smallest free block of at least `size` bytes; None if there is none.

        The last block of an expandable segment is used only if no other fits.
        """
        at = bisect.bisect_left(self.keys, (size, 0, 0))
        found = [self.blocks[key] for key in self.keys[at : at + 2]]
        return next((x for x in found if x is not self.last), found[0] if found else None)


class CachingAllocator:
    """A simulation of PyTorch's CUDA caching allocator, which counts bytes and owns no memory.

    Attributes:
        limit_bytes: maximum of `reserved_bytes`; None for no limit.
        allocated_bytes, reserved_bytes: current totals; `peak_…` are their maxima so far.
        segments: number of segments reserved now.
        releases: how often the limit was reached, so that free segments were returned to the driver.
    """

    def __init__(
        self, limit_bytes: int | None = None, *, expandable: bool = False, grows: bool = False
    ) -> None:
        """Make an allocator that has reserved no memory yet.

        Args:
            limit_bytes: None for no limit.
            expandable: whether it uses expandable segments.
            grows: raise the limit instead of failing, so that the final peak is the smallest limit that
                suffices.
        """
        self.limit_bytes, self._expandable, self._grows = limit_bytes, expandable, grows
        self._small = Pool(BLOCK_BYTES, SMALL_SEGMENT_BYTES)
        self._large = Pool(BLOCK_BYTES if expandable else SMALL_BYTES + 1, LARGE_SEGMENT_BYTES)
        self.allocated_bytes = self.reserved_bytes = self.segments = self.releases = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._places = itertools.count(1)

    def allocate(self, nbytes: int) -> Block | None:
        """Allocate a block of at least `nbytes`; return None if `nbytes` is 0.

        Raises:
            OutOfMemory: the limit would be exceeded and may not grow.
        """
        if nbytes <= 0:
            return None
        size = round_size(nbytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = pool.find(size)
        if block is not None:
            pool.take(block)
        else:
            block = self._expand(pool, size) if self._expandable else self._add_segment(pool, size)
        if block.size - size >= pool.least_rest:
            rest = Block(pool, block.place, block.start + size, block.size - size)
            rest.before, rest.after, block.after, block.size = block, block.after, rest, size
            if rest.after is not None:
                rest.after.before = rest
            if pool.last is block:
                pool.last = rest
            pool.put(rest)
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block | None) -> None:
        """Free a block and merge it with its free neighbours; None does nothing."""
        if block is None:
            return
        pool = block.pool
        self.allocated_bytes -= block.size
        if block.before is not None and block.before.is_free:
            pool.take(block.before)
            block = self._join(block.before, block)
        if block.after is not None and block.after.is_free:
            pool.take(block.after)
            block = self._join(block, block.after)
        pool.put(block)

    def release(self) -> None:
        """Return unused memory to the driver, as `empty_cache` does and as happens when memory runs out."""
        for pool in (self._small, self._large):
            for block in [*pool.blocks.values()]:
                if self._expandable:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.take(block)
                    self.reserved_bytes -= block.size
                    self.segments -= 1

    def _join(self, first: Block, second: Block) -> Block:
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        if first.pool.last is second:
            first.pool.last = first
        return first

    def _reserve(self, nbytes: int) -> None:
        if self._lacks(nbytes):
            if not self._grows:
                raise OutOfMemory(f"{nbytes} bytes beside {self.reserved_bytes}")
            self.limit_bytes = self.reserved_bytes + nbytes
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _lacks(self, nbytes: int) -> bool:
        return self.limit_bytes is not None and self.reserved_bytes + nbytes > self.limit_bytes

    def _make_room(self, nbytes: int) -> None:
        """Return unused memory to the driver if reserving `nbytes` more would exceed the limit."""
        if self._lacks(nbytes):
            self.releases += 1
            self.release()

    def _add_segment(self, pool: Pool, size: int) -> Block:
        taken = size_segment(size)
        self._make_room(taken)
        self._reserve(taken)
        self.segments += 1
        return Block(pool, next(self._places), 0, taken)

    def _expand(self, pool: Pool, size: int) -> Block:
        """Map pages at the end of a pool's segment; return them, joined with its last block if free."""
        self._make_room(pool.count_pages(size))
        pages = pool.count_pages(size)  # the free end may have gone back
        self._reserve(pages)
        last = pool.last
        if last is not None and last.is_free:
            pool.take(last)
            last.size += pages
            return last
        if last is None:
            self.segments += 1
            block = Block(pool, next(self._places), 0, pages)
        else:
            block = Block(pool, last.place, last.start + last.size, pages)
            block.before, last.after = last, block
        pool.last = block
        return block

    def _unmap(self, pool: Pool, block: Block) -> None:
        """Unmap the whole pages inside a free block; what remains on either side stays free."""
        begin = -(-block.start // pool.page) * pool.page
        end = (block.start + block.size) // pool.page * pool.page
        if end <= begin:
            return
        pool.take(block)
        self.reserved_bytes -= end - begin
        sides = [(block.start, begin - block.start), (end, block.start + block.size - end)]
        left, right = (Block(pool, block.place, at, n) if n else None for at, n in sides)
        if block.before is not None:
            block.before.after = left
        if block.after is not None:
            block.after.before = right
        for side, before, after in ((left, block.before, None), (right, None, block.after)):
            if side is not None:
                side.before, side.after = before, after
                pool.put(side)
        if pool.last is block:
            # the segment goes on behind the hole, at the start of a page
            pool.last = right or left or block.before
            if pool.last is None:
                self.segments -= 1
