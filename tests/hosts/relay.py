"""A link between two network namespaces that delays and loses packets, for kernels without netem.

Run as a program: NAMESPACE NAMESPACE DELAY_S LOSS. Makes a device ``link0`` in each, writes a line when both are there,
and carries packets from one to the other until it is ended; the devices end with it.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from typing import Final

# linux/if_tun.h, linux/sched.h
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000
_CLONE_NEWNET: Final = 0x40000000
_PACKET_BYTES: Final = 65_536


def open_device(namespace: str) -> int:
    """A device in a namespace; this process is there afterwards, and the descriptor works anywhere."""
    libc = ctypes.CDLL(None, use_errno=True)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    finally:
        os.close(there)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"link0", _IFF_TUN | _IFF_NO_PI))
    return device


def relay(devices: tuple[int, int], delay_s: float, loss: float) -> None:
    """Carries packets for ever. What is lost follows from a seed."""
    chance = random.Random(1)
    other = {devices[0]: devices[1], devices[1]: devices[0]}
    #: When to deliver, where, what; in order, since all packets take the same time.
    way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        wait_s = max(0.0, way[0][0] - time.monotonic()) if way else None
        ready, _, _ = select.select(devices, [], [], wait_s)
        for device in ready:
            packet = os.read(device, _PACKET_BYTES)
            if chance.random() >= loss:
                way.append((time.monotonic() + delay_s, other[device], packet))
        while way and way[0][0] <= time.monotonic():
            _, device, packet = way.popleft()
            try:
                os.write(device, packet)
            except OSError:  # the device is not up, or its queue is full: lost
                pass


if __name__ == "__main__":
    ends = open_device(sys.argv[1]), open_device(sys.argv[2])
    print("ready", flush=True)
    relay(ends, float(sys.argv[3]), float(sys.argv[4]))
