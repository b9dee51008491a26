"""Copy engines: move a job's fragments between an engine's KV memory and the pool in a few native calls.

    contract        what every engine promises, and to whom          (no torch)
    cpu             KV memory on the host: one loop of memcpy without the interpreter lock
    cuda            KV memory on a GPU: registered pool, streams and events
    lanes           a direction's streams, buffers and jobs
    plan            what of a job shares a buffer there             (no torch)
    copies          copies that are queued in parts                 (no torch)
    launches        the kernel as jobs use it
    expected        what is read for a load before it comes
    watched         stores that end though nobody looks             (no torch)
    registration    makes the pool known to the GPU, in the background
    paths           which way a batch goes, from measurements           (no torch)
    runs            array arithmetic on fragments                       (no torch)
    reads           loads past the pool: files into KV memory           (no torch)
    gds             how those are read on a GPU: kvikio
    stage           the buffer there that they are checked in
    xxh3            their checksum, on the GPU
    kernels         the Triton kernel
    cudart          the CUDA runtime calls that torch does not offer

Nothing here loops over fragments in Python: in an engine that shares its process with a busy scheduler thread, each of
the hundreds of fragments of a prefix would wait for the interpreter lock (measured: 2 s instead of 60 ms for 62 MB).
"""
