"""Has a running Python process call a script on its main thread, between two bytecodes.

Python 3.14 has a door for that (PEP 768). In older ones, a thread of the process is stopped for a moment and
sent through a few instructions that call ``Py_AddPendingCall(PyRun_SimpleString, script)``, which needs neither the GIL
nor the allocator; the interpreter then runs the script where it handles signals. The instructions save and restore all
registers by themselves and return to where the thread was: once it runs again, nothing depends on this process, which
may be killed at any moment. They lie behind the code of a library, in the rest of its last page, which nothing uses, so
that neither memory is allocated in the process nor a file changed.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from memprof.errors import InconclusiveError, UsageError

_PAGE = 4096
#: Requests of ptrace(2).
_POKE, _CONTINUE, _GET_REGISTERS, _SET_REGISTERS, _DETACH, _SEIZE, _INTERRUPT = 5, 7, 12, 13, 17, 0x4206, 0x4207
_STOPPED_BY_US = 128  # PTRACE_EVENT_STOP, in the upper half of a wait status
#: Registers of x86-64 in the order of ``struct user_regs_struct``, of which these are used.
_REGISTERS, _RAX, _ORIG_RAX, _RIP, _RSP = 27, 10, 15, 16, 19
#: Bytes that a function may use below its stack pointer, and that the call needs of a thread's stack.
_RED_ZONE, _STACK = 128, 64 * 1024
#: What the kernel leaves in rax of a system call that it begins again (include/linux/errno.h), and the call that goes
#: on with one that has a timeout.
_AGAIN, _AGAIN_BY_BLOCK, _RESTART_SYSCALL = (-512, -513, -514), -516, 219
_SYSCALL_BYTES = 2
_STOP_S = 2.0
_EXECUTABLE, _LOAD, _DYNSYM = 1, 1, (11, 2)
_RUN, _ADD = b"PyRun_SimpleString", b"Py_AddPendingCall"


class CannotAttachError(UsageError):
    """The process is not a job that this user may attach to here (exit code 2)."""


class NoAnswerError(InconclusiveError):
    """The job ended, or did not answer in time (exit code 3)."""


@dataclass(frozen=True)
class Mapping:
    """What a process has mapped: addresses from start to end, permissions, place in the file; "" without one."""

    start: int
    end: int
    flags: str
    offset: int
    path: str


def read_mappings(pid: int) -> list[Mapping]:
    """Returns what a process has mapped, in order of the addresses.

    Raises:
        OSError: It has ended, or may not be read.
    """
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        addresses, flags, offset, _, _, *path = line.split(maxsplit=5)
        start, end = (int(each, 16) for each in addresses.split("-"))
        found.append(Mapping(start, end, flags, int(offset, 16), "".join(path)))
    return found


def run_remotely(pid: int, script: Path) -> None:
    """Runs a script in a process of Python 3.14, by an interpreter of the same build.

    Raises:
        CannotAttachError: It does not permit this.
    """
    code = f"import sys; sys.remote_exec({pid}, {str(script)!r})"
    program = os.readlink(f"/proc/{pid}/exe")
    done = subprocess.run([program, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise CannotAttachError(
            f"process {pid} does not accept a script ({reason}): start it without -X disable-remote-debug and "
            "PYTHON_DISABLE_REMOTE_DEBUG, in a Python that is built with remote debugging."
        )


def inject(pid: int, code: str) -> None:
    """Has a process of Python 3.11 to 3.13 run some code on its main thread, at the next safe moment.

    Args:
        pid: The process.
        code: One line in ASCII; it must not raise.

    Raises:
        CannotAttachError: It has no symbols or no room, or this system does not permit it.
        NoAnswerError: It has ended, or none of its threads can be stopped.
    """
    if os.uname().machine != "x86_64":
        raise CannotAttachError(
            f"attaching to Python before 3.14 needs x86-64, and this is {os.uname().machine}: use Python 3.14."
        )
    if "shstk" in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace"):
        raise CannotAttachError(
            f"process {pid} runs with shadow stacks, which permit no call from outside: use Python 3.14."
        )
    mappings = read_mappings(pid)
    run, add = (_find_symbol(pid, mappings, name) for name in (_RUN, _ADD))
    text = code.encode("ascii") + b"\0"
    room = _find_room(pid, mappings, len(_instructions(0, 0, 0)) + len(text))
    # In a thread of its own, at whose end the kernel lets go of what it traced, also of a thread that did not stop.
    with ThreadPoolExecutor(1) as tracer:
        if tracer.submit(lambda: any(_send_through(each, room, text, run, add) for each in _threads(pid))).result():
            return
    raise NoAnswerError(f"no thread of process {pid} could be stopped: it waits for a device or a file, or has ended.")


# -- the instructions -------------------------------------------------------------------------------------------------


def _instructions(add: int, run: int, text: int) -> bytes:
    """Returns the code that calls ``add(run, text)`` and returns with all registers as they were.

    Where to is on the thread's own stack, so that the bytes are the same for every thread and request.
    """
    return b"".join(
        (
            bytes.fromhex("9c5051525355565741504151415241534154415541564157"),  # push the flags and all registers
            bytes.fromhex("fc4889e54881ec004000004883e4c0"),  # cld; 16 KiB of stack, aligned to 64
            bytes.fromhex("31c0488dbc2400020000b908000000f348ab"),  # clear the header of the area for xsave
            bytes.fromhex("b8ffffffff89c2480fae2424"),  # xsave64 [rsp]: vector registers
            b"\x48\xbf" + struct.pack("<Q", run),  # mov rdi
            b"\x48\xbe" + struct.pack("<Q", text),  # mov rsi
            b"\x48\xb8" + struct.pack("<Q", add),  # mov rax
            b"\xff\xd0",  # call rax
            bytes.fromhex("b8ffffffff89c2480fae2c24"),  # xrstor64 [rsp]
            bytes.fromhex("4889ec"),  # mov rsp, rbp
            bytes.fromhex("415f415e415d415c415b415a415941585f5e5d5b5a59589d"),  # pop them
            bytes.fromhex("c28000"),  # ret 128: on, past what the function has below its stack pointer
        )
    )


def _send_through(thread: int, room: int, text: bytes, run: int, add: int) -> bool:
    """Sends a thread through the instructions; returns whether it could be stopped."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong)
    libc.ptrace.restype = ctypes.c_long

    def ask(request: int, address: int = 0, data: int = 0) -> None:
        if libc.ptrace(request, thread, address, data) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    try:
        ask(_SEIZE)
    except PermissionError:
        raise CannotAttachError(
            f"this system does not permit tracing process {thread}: it is traced by a debugger already, or its "
            "container lacks SYS_PTRACE (docker run --cap-add SYS_PTRACE)."
        ) from None
    except OSError:  # the thread has ended
        return False
    is_stopped = False
    try:
        ask(_INTERRUPT)
        is_stopped = _wait_for_stop(thread, ask)
        if not is_stopped:
            return False
        registers = (ctypes.c_ulonglong * _REGISTERS)()
        ask(_GET_REGISTERS, 0, ctypes.addressof(registers))
        resume, value = int(registers[_RIP]), ctypes.c_longlong(registers[_RAX]).value
        call = ctypes.c_longlong(registers[_ORIG_RAX]).value
        if call >= 0 and (value in _AGAIN or value == _AGAIN_BY_BLOCK):  # what the kernel would do on the way back
            resume -= _SYSCALL_BYTES
            registers[_RAX] = call if value in _AGAIN else _RESTART_SYSCALL
        size = len(_instructions(0, 0, 0))
        stack = int(registers[_RSP]) - _RED_ZONE - 8
        is_inside = room <= resume < room + size or add <= resume < add + _PAGE  # an earlier attach is not through yet
        if is_inside or not _has_stack(thread, stack):
            return False
        data = _instructions(add, run, room + size) + text
        data += bytes(-len(data) % 8)
        for place in range(0, len(data), 8):
            ask(_POKE, room + place, int.from_bytes(data[place : place + 8], "little"))
        ask(_POKE, stack, resume)
        registers[_RIP], registers[_RSP], registers[_ORIG_RAX] = room, stack, 2**64 - 1  # not in a system call
        ask(_SET_REGISTERS, 0, ctypes.addressof(registers))
        return True
    except (ProcessLookupError, ChildProcessError, FileNotFoundError):
        return False
    finally:
        if is_stopped:
            libc.ptrace(_DETACH, thread, 0, 0)


def _has_stack(thread: int, pointer: int) -> bool:
    """Whether a thread's stack has room for the call; that of the main thread grows by itself."""
    found = next((each for each in read_mappings(thread) if each.start <= pointer < each.end), None)
    return found is not None and (found.path == "[stack]" or pointer - found.start >= _STACK)


def _wait_for_stop(thread: int, ask) -> bool:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + _STOP_S
    while time.monotonic() < deadline:
        found, status = os.waitpid(thread, os.WNOHANG | 0x40000000)  # __WALL: threads too
        if not found:
            time.sleep(0.0002)
        elif not os.WIFSTOPPED(status):
            return False
        elif status >> 16 == _STOPPED_BY_US:
            return True
        else:  # a signal arrived meanwhile: the thread gets it
            ask(_CONTINUE, 0, os.WSTOPSIG(status))
    return False


def _threads(pid: int) -> list[int]:
    """Returns the threads of a process, first those that wait in the kernel: they are inside no lock of Python's."""
    found = [int(each) for each in os.listdir(f"/proc/{pid}/task")]

    def order(thread: int) -> tuple[int, bool]:
        try:
            state = Path(f"/proc/{pid}/task/{thread}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            state = "X"
        return "SR".find(state) if state in "SR" else 2, thread == pid

    return sorted(found, key=order)


# -- the process's libraries -------------------------------------------------------------------------------------------


def _file_of(pid: int, mapping: Mapping) -> Path:
    return Path(f"/proc/{pid}/root{mapping.path}")


def _program_headers(data: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields type, flags, place in the file, address and bytes in the file of each segment of an ELF file."""
    at, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    for number in range(count):
        kind, flags, offset, address, _, in_file = struct.unpack_from("<IIQQQQ", data, at + number * size)
        yield kind, flags, offset, address, in_file


def _read_head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(_PAGE)
    except OSError:
        return b""
    return head if head[:5] == b"\x7fELF\x02" else b""


def _find_symbol(pid: int, mappings: list[Mapping], name: bytes) -> int:
    """Returns the address of a function of the interpreter in a process.

    Raises:
        CannotAttachError: It is not exported.
    """
    program = os.readlink(f"/proc/{pid}/exe")
    for mapping in mappings:
        is_python = mapping.path == program or "libpython3" in os.path.basename(mapping.path)
        if not is_python or mapping.offset:
            continue
        try:
            data = _file_of(pid, mapping).read_bytes()
        except OSError:
            continue
        first = next((address for kind, _, offset, address, _ in _program_headers(data)
                      if kind == _LOAD and offset == 0), 0)  # fmt: skip
        value = _symbol_in(data, name)
        if value:
            return mapping.start - first + value
    raise CannotAttachError(
        f"the Python of process {pid} does not export {name.decode()}: it is stripped, or its file was replaced."
    )


def _symbol_in(data: bytes, name: bytes) -> int:
    at, size, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, at + number * size) for number in range(count)]
    for _, kind, _, _, offset, length, link, _, _, entry in sections:
        if kind not in _DYNSYM or not entry:
            continue
        texts = data[sections[link][4] : sections[link][4] + sections[link][5]]
        wanted = texts.find(b"\0" + name + b"\0") + 1
        for text, _, _, shndx, value, _ in struct.iter_unpack("<IBBHQQ", data[offset : offset + length]):
            if shndx and text and (text == wanted or texts[text : text + len(name) + 1] == name + b"\0"):
                return int(value)
    return 0


def _find_room(pid: int, mappings: list[Mapping], size: int) -> int:
    """Returns an address with room for that many bytes, in the unused end of the last page of a library's code.

    Raises:
        CannotAttachError: There is none.
    """
    for mapping in mappings:
        is_code = mapping.path.startswith("/") and mapping.flags == "r-xp"
        if not is_code or "/ld-linux" in mapping.path:
            continue
        for kind, flags, offset, _, in_file in _program_headers(_read_head(_file_of(pid, mapping)) or bytes(64)):
            end = offset + in_file
            is_this = mapping.offset <= offset < mapping.offset + (mapping.end - mapping.start)
            if kind != _LOAD or not flags & _EXECUTABLE or not is_this:
                continue
            start = mapping.start + (end - mapping.offset)
            last = start + -start % _PAGE
            start += -start % 64
            if start + size + 8 <= min(mapping.end, last):
                return start
    raise CannotAttachError(f"no library of process {pid} leaves room for the call: use Python 3.14 for the job.")
