"""A campaign of faults against a whole platform, drawn by a seed: `python bench/chaos.py --seed N --minutes M`.

command.py       the campaign: runs of several shapes, a fault every few seconds, then the proof
faults.py        what can fail: processes, disks, connections, servers, clocks
processes.py     finds the platform's processes by what they are
proxy.py         the connection between a worker and the platform, which can be cut and slowed down
clock.py         the clock of a worker, which can jump
conservation.py  what must hold afterwards
"""
