"""`moe-infinity doctor`: can this machine and its software run models well, and what to change?

    examination.py    looks at this machine
    lines.py          says a line about each thing, from what was seen

Nothing is changed: a disk is tried with a temporary file in the cache folder.
"""
