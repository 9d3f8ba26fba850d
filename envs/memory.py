"""Memory that was freed is kept by the process for what comes next, instead of going back to the system each time.

The C library's allocator gives the end of its heap back as soon as 128 KiB of it are free, and large blocks always; the
next answer of an engine then takes a page fault for every 4 KiB, which costs more than reading and decoding it. Both
limits rise by themselves, for the whole process, when a large block is freed: so one is taken and freed, once, untouched.
Up to twice its size may then stay with the process, free. Other allocators take no notice.
"""

_BLOCK_BYTES = 16 * 1024 * 1024


def keep_freed_memory() -> None:
    """Call this once in a process that handles large messages."""
    # Not a bytearray: that writes its zeros, which takes a page fault for each of its pages.
    bytes(_BLOCK_BYTES)
