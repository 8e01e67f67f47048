"""Everything that depends on the operating system. There are two paths: Linux, and a plain one that
works wherever Python and psutil do, with the same results and more work for the processor.

    linux.py           the question which of the two it is; system calls that Python has no name for
    files.py           reads and writes at an offset, past the page cache or through it; locks
    memory.py          large blocks of memory, and files as memory
    machine.py         cores, NUMA nodes, memory, the limits of a container; Ctrl-C
    process_limits.py  memory, time and files that a process may have
    threads.py         threads that serve go on after errors
"""
