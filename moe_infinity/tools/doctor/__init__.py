"""Whether this machine and its software can run models well, and what to change: `moe-infinity
doctor`. Of everything looked at there is one `Line`.

    examination.py    looks at this machine, and asks for the lines
    packages.py       Python and packages
    hardware.py       processor, memory, limits, GPU
    storage.py        disks, and compiled kernels

What decides a line is a function of what was seen, so that bad machines can be made up in tests.
Nothing is changed: a disk is tried with a temporary file in the cache folder.
"""
