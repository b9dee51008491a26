"""Which way a batch goes on a GPU, chosen from measurements (docs/gpu.md has the table).

staged     a kernel gathers the fragments into a buffer on the GPU (or scatters them out of it) at the speed of GPU
           memory, and the copy engine moves the buffer from or to the pool in long runs: the speed of one large
           copy for fragments of any size, and next to no time on the multiprocessors. Needs runs in the pool.
batch      one call hands all fragments to the copy engine: best where they are long by themselves
kernel     a kernel with few programs reads and writes the registered pool itself: best where nothing is long
pageable   what is not registered (yet): the batch call, with the driver's own staging
"""

from __future__ import annotations

from typing import Final, Literal

Path = Literal["staged", "batch", "kernel", "pageable"]
#: What the setting `kvstore.copy_engine` may say. `auto` chooses job by job.
CHOICES: Final = ("auto", "staged", "batch", "kernel", "pageable")

#: From this mean fragment on, the batch call reaches the limit by itself, without a detour on the GPU.
BATCH_FRAGMENT_BYTES_MIN: Final = 2 << 20
#: Below this mean run, the copy engine spends too much on each copy, and the kernel is faster.
STAGED_RUN_BYTES_MIN: Final = 256 << 10
#: Beside the model's own kernels the batch call is taken from this mean fragment on: it costs them nothing, and three
#: quarters of the bus. The other ways slow a large matrix product by 5 to 10 % and, for `kernel`, by a factor of 3.
BESIDE_FRAGMENT_BYTES_MIN: Final = 32 << 10
#: Below this, a store is over before the two steps of `staged` pay: one launch is all that `kernel` takes. A load is
#: faster staged whatever its size, as the bus is busy while the host makes the kernel's table.
STAGED_STORE_BYTES_MIN: Final = 32 << 20


def choose(
    size_bytes: int,
    fragments: int,
    mean_run_bytes: int,
    *,
    staging: bool,
    mapped: bool,
    beside_compute: bool,
    is_load: bool,
) -> Path:
    """The best path for registered memory: the fastest, or beside the model's kernels one that does not slow them.

    Args:
        mean_run_bytes: Mean length of what is contiguous in the pool.
        staging: Buffers on the GPU could be had.
        mapped: The GPU can address the pool itself.
    """
    if size_bytes >= fragments * (BESIDE_FRAGMENT_BYTES_MIN if beside_compute else BATCH_FRAGMENT_BYTES_MIN):
        return "batch"
    if not mapped:
        return "staged" if staging else "batch"
    pays = is_load or beside_compute or size_bytes >= STAGED_STORE_BYTES_MIN
    return "staged" if staging and pays and mean_run_bytes >= STAGED_RUN_BYTES_MIN else "kernel"
