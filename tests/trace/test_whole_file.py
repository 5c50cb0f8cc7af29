"""Files are written where their name points, fully or not at all; devices, pipes and folders are never replaced."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from memprof.errors import OutputError
from memprof.trace.files import place as place_module
from memprof.trace.files.place import check_output
from memprof.trace.files.whole_file import whole_file, whole_folder

IS_ROOT = os.geteuid() == 0


def write(path: Path, content: bytes = b"new") -> None:
    with whole_file(path) as file:
        file.write(content)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    """A link, and a link to a link in another folder, lead to the file that is replaced; the links are kept."""
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "target"
    target.write_bytes(b"old")
    (tmp_path / "there" / "second").symlink_to("target")
    (tmp_path / "first").symlink_to("there/second")
    write(tmp_path / "first")
    assert target.read_bytes() == b"new"
    assert (tmp_path / "first").is_symlink()
    assert (tmp_path / "there" / "second").is_symlink()
    assert left_in(tmp_path / "there") == ["second", "target"]


def test_a_link_to_nothing_makes_its_target(tmp_path: Path) -> None:
    """As with a shell's ``>``; if the target's folder is missing, an error is raised before any work."""
    (tmp_path / "link").symlink_to("made")
    check_output(tmp_path / "link", force=False)
    write(tmp_path / "link")
    assert ((tmp_path / "made").read_bytes(), (tmp_path / "link").is_symlink()) == (b"new", True)
    (tmp_path / "far").symlink_to("missing/made")
    with pytest.raises(OutputError, match=r"no folder .*missing"):
        check_output(tmp_path / "far", force=False)


def test_a_link_to_a_file_is_replaced_with_force_alone(tmp_path: Path) -> None:
    """A file behind a link counts as existing, like one named directly."""
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(OutputError, match="exists already"):
        check_output(tmp_path / "link", force=False)
    check_output(tmp_path / "link", force=True)


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    """A cyclic link is reported as such."""
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OutputError, match="is a circular link"):
        write(tmp_path / "a")


def test_other_hard_links_keep_what_they_hold(tmp_path: Path) -> None:
    """A name is given a new file; the old one stays under its other names."""
    (tmp_path / "one").write_bytes(b"old")
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    write(tmp_path / "one")
    assert ((tmp_path / "one").read_bytes(), (tmp_path / "two").read_bytes()) == (b"new", b"old")


def make_folder(path: Path) -> None:
    path.mkdir()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # a path of 108 bytes at most


def make_block_device(path: Path) -> None:
    if not IS_ROOT:
        pytest.skip("only root makes device nodes")
    try:
        os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(7, 99))
    except PermissionError:
        pytest.skip("no device nodes in this container")


@pytest.mark.parametrize(
    ("make", "named"), [(make_folder, "a folder"), (make_socket, "a socket"), (make_block_device, "a block device")]
)
@pytest.mark.parametrize("is_linked", [False, True])
def test_what_is_no_file_is_refused_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], named: str, is_linked: bool
) -> None:
    """A folder, a socket and a block device are named in the message, directly and behind a link."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "node")
    (tmp_path / "link").symlink_to("node")
    path = tmp_path / ("link" if is_linked else "node")
    before = (tmp_path / "node").lstat()
    for force in (False, True):
        with pytest.raises(OutputError, match=f"is {named}, not a file"):
            check_output(path, force=force)
    with pytest.raises(OutputError, match=f"is {named}, not a file"):
        write(path)
    after = (tmp_path / "node").lstat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    assert left_in(tmp_path) == ["link", "node"]


def test_a_device_is_written_through_and_stays(tmp_path: Path) -> None:
    """A node like /dev/null, made for the test, takes what is written, needs no -f, and is the same node after."""
    if not IS_ROOT:
        pytest.skip("only root makes device nodes")
    node = tmp_path / "null"
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        with node.open("wb"):
            pass
    except PermissionError:
        pytest.skip("no device nodes in this container")
    before = node.stat()
    check_output(node, force=False)
    write(node, b"x" * 100_000)
    after = node.stat()
    assert (after.st_mode, after.st_ino, after.st_rdev) == (before.st_mode, before.st_ino, before.st_rdev)
    assert left_in(tmp_path) == ["null"]


def test_a_full_device_is_told(tmp_path: Path) -> None:
    """A node like /dev/full has no space: one sentence, and it stays."""
    if not IS_ROOT:
        pytest.skip("only root makes device nodes")
    node = tmp_path / "full"
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 7))
        with node.open("wb"):
            pass
    except PermissionError:
        pytest.skip("no device nodes in this container")
    with pytest.raises(OutputError, match=r"full cannot be written: No space left on device\. Choose another place\."):
        write(node)
    assert stat.S_ISCHR(node.stat().st_mode)


def test_a_pipe_is_written_through(tmp_path: Path) -> None:
    """Who reads a named pipe gets all of it, more than the pipe holds, also when they come a little later."""
    pipe, content, got = tmp_path / "pipe", os.urandom(300_000), list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Timer(0.1, lambda: got.append(pipe.read_bytes()))
    reader.start()
    write(pipe, content)
    reader.join()
    assert got == [content]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_pipe_that_nobody_reads_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for without end."""
    monkeypatch.setattr(place_module, "_READER_WAIT_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="nobody reads this pipe"):
        write(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_nothing_goes_through_where_the_work_fails(tmp_path: Path) -> None:
    """A reader of a pipe gets no half file."""
    read, written = os.pipe()

    def fail() -> None:
        with whole_file(Path(f"/dev/fd/{written}")) as file:
            file.write(b"half")
            raise RuntimeError

    try:
        with pytest.raises(RuntimeError):
            fail()
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    finally:
        os.close(read)
        os.close(written)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_the_output_of_the_process_is_written_where_it_stands(tmp_path: Path, name: str) -> None:
    """Into a file that a shell opened it goes behind what is there; that file is not replaced by another."""
    out = tmp_path / "out"
    out.write_bytes(b"before ")
    code = (
        "from pathlib import Path; from memprof.trace.files.whole_file import whole_file\n"
        f"print('printed', end=' ')\nwith whole_file(Path({name!r})) as file: file.write(b'written')\n"
    )
    inode = out.stat().st_ino
    with out.open("ab") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert (out.read_bytes(), out.stat().st_ino) == (b"before printed written", inode)


def test_a_descriptor_that_is_not_open_is_told() -> None:
    """The sentence names it."""
    with pytest.raises(OutputError, match="/dev/fd/9999 cannot be written: Bad file descriptor"):
        write(Path("/dev/fd/9999"))


def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path: Path) -> None:
    """If the disk is full, the old file stays, no temporary file is left, and one message gives the reason."""
    (tmp_path / "file").write_bytes(b"old")
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from memprof.trace.files.whole_file import whole_file\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n    with whole_file(Path(sys.argv[1])) as file: file.write(b'x' * 100_000)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "file")], capture_output=True, text=True, check=True
    )
    place = tmp_path / "file"
    assert done.stdout == (
        f"DiskFullError {place} cannot be written: the file size limit of this shell, ulimit -f, is 4.00 KiB. "
        "Raise it.\n"
    )
    assert ((tmp_path / "file").read_bytes(), left_in(tmp_path)) == (b"old", ["file"])


@pytest.mark.skipif(IS_ROOT, reason="root may write anywhere")
def test_protection_is_kept(tmp_path: Path) -> None:
    """A write-protected file is not renamed over, and in a folder that cannot be written nothing is tried."""
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "file").chmod(0o444)
    with pytest.raises(OutputError, match="is write-protected"):
        check_output(tmp_path / "file", force=True)
    with pytest.raises(OutputError, match="is write-protected"):
        write(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"old"
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(OutputError, match="Permission denied"):
            write(tmp_path / "other")
    finally:
        tmp_path.chmod(0o755)


def test_names_of_all_kinds(tmp_path: Path) -> None:
    """The longest name, one with a line break, and one that is not UTF-8 are written; a longer one is refused."""
    longest = "n" * os.pathconf(tmp_path, "PC_NAME_MAX")
    for name in (longest, "two\nlines", os.fsdecode(b"\xff\xfe")):
        write(tmp_path / name)
        assert (tmp_path / name).read_bytes() == b"new"
    for bad in (f"{longest}n", "a/" * 5000, "null\0character", ""):
        with pytest.raises(OutputError):
            write(tmp_path / bad if bad else Path())
    assert len(left_in(tmp_path)) == 3


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    """A relative name in a folder deleted meanwhile is refused with a message."""
    code = (
        "import os, sys; from pathlib import Path; from memprof.trace.files.whole_file import whole_file\n"
        "os.chdir(sys.argv[1]); os.rmdir(sys.argv[1])\n"
        "try:\n    with whole_file(Path('file')) as file: file.write(b'x')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "gone")], capture_output=True, text=True, check=True
    )
    assert done.stdout == "OutputError file cannot be written: No such file or directory. Choose another place.\n"


def test_a_link_to_a_folder_stays_and_its_folder_is_written(tmp_path: Path) -> None:
    """Exported tables go where the link leads; over a file or a pipe, nothing is written."""
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    with whole_folder(tmp_path / "link") as folder:
        (folder / "new").write_text("x")
    assert ((tmp_path / "link").is_symlink(), left_in(tmp_path / "target")) == (True, ["new"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="is not a folder and was left alone"), whole_folder(tmp_path / "pipe"):
        pass
    assert left_in(tmp_path) == ["link", "pipe", "target"]
