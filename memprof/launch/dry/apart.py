"""Runs a command isolated: writes in its folder are redirected, and its only network is its own loopback.

Linux allows this to any user in a user namespace (user_namespaces(7)), unless the administrator disabled it. This file
is a standalone script for the bare interpreter, so that nothing of memprof is imported where the command runs:

    python -I -S apart.py SCRATCH [COMMAND...]

Writes go to SCRATCH, mounted over the current folder (overlayfs); without a command it only tests whether isolation
works. If it does not, it exits with status 125 and a message; otherwise it execs the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys

CANNOT = 125
#: Variable of a process that is to isolate itself: its folder for redirected writes.
SCRATCH = "MEMPROF_SCRATCH"
# <linux/sched.h>, <linux/mount.h>, <linux/sockios.h>, <linux/if.h>
_NEW_MOUNTS, _NEW_USER, _NEW_NETWORK = 0x00020000, 0x10000000, 0x40000000
_RECURSIVE, _PRIVATE = 0x4000, 0x40000
_SET_FLAGS, _UP = 0x8914, 0x1
# <linux/capability.h>: version 3 of the sets, two of which follow as zeros
_CAPABILITIES = 0x20080522


def main(scratch: str, command: list[str]) -> None:
    """Isolates this process and execs the command.

    Args:
        scratch: An empty folder, outside the current one.
        command: The command line; empty to test only.
    """
    try:
        isolate(scratch)
    except OSError as error:
        sys.exit(_say(error.strerror or str(error)))
    if command:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python at startup; a command expects the default
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)


def isolate(scratch: str) -> None:
    """Isolates this process, which must have one thread; a program that it execs has its user's rights again.

    Args:
        scratch: An empty folder, outside the current one.

    Raises:
        OSError: The system forbids it, or the current folder cannot be overlaid.
    """
    folder = os.getcwd()
    _check(folder, scratch)
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_NETWORK)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    _call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
    _lay_over(folder, scratch)
    os.chdir(folder)
    _raise_loopback()


def drop_rights() -> None:
    """Drops the capabilities that a process gained in its own namespaces, as an exec does; root keeps them.

    Raises:
        OSError: The system refuses it.
    """
    if os.geteuid():
        _call("capset", struct.pack("Ii", _CAPABILITIES, 0), bytes(24))


def _check(folder: str, scratch: str) -> None:
    """Raises an OSError if the folder's files cannot be overlaid faithfully, or memprof's own would be hidden."""
    beside = os.path.join(os.path.realpath(folder), "")
    if os.path.join(os.path.realpath(scratch), "").startswith(beside):
        raise OSError("the folder for temporary files is inside this one")
    if any(sign in folder + scratch for sign in ",:\\"):
        raise OSError("the name of this folder contains a comma, a colon or a backslash")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        points = [line.split()[4] for line in mounts]
    if any(point.startswith(beside) for point in points):
        raise OSError("another file system is mounted inside this folder")


def _lay_over(folder: str, scratch: str) -> None:
    """Mounts an overlay over a folder: reads come from the folder, writes go to the scratch folder."""
    above, work = os.path.join(scratch, "files"), os.path.join(scratch, "work")
    for path in (above, work):
        os.mkdir(path, 0o700)
    options = f"lowerdir={folder},upperdir={above},workdir={work},userxattr"
    _call("mount", b"overlay", os.fsencode(folder), b"overlay", 0, os.fsencode(options))


def _raise_loopback() -> None:
    """Brings up the loopback interface, so that the ranks of one job reach one another."""
    import fcntl  # Windows, where recordings are only read, lacks it

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sh", b"lo", _UP))


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as opened:
        opened.write(text)


def _say(reason: str) -> int:
    sys.stderr.write(f"{reason}\n")
    return CANNOT


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
