"""What differs between operating systems. No other part of the package asks which one runs it.

    features.py          what this one has, found once
    files.py             reads and writes at an offset, past the page cache or through it; locks
    memory.py            large blocks of memory, and files as memory
    machine.py           cores, NUMA nodes, memory
    control_groups.py    the limits of a container
    processes.py         Ctrl-C, processes of their own, sockets
    linux.py             system calls of Linux that Python has no name for

Whatever a system lacks is done another way, with the same results.
"""
