"""Programs that attack the sandbox. Each test looks at the effect outside, not only at what the program says.

Every attack is bounded in itself (numbers, sizes, seconds), so that a hole costs a failed test and not the machine.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.workers.agents.sandbox.conftest import Marked
from troupe.workers.agents.sandbox.run import SandboxLimits, SandboxResult, run_python

SECRET = "hf_this_is_a_secret_of_the_test"
SMALL = SandboxLimits(timeout_s=5.0, memory_mib=128, disk_mib=8, processes=8)


def attack(code: str, limits: SandboxLimits = SMALL, prefix: str = "") -> SandboxResult:
    """Run an attack."""
    return run_python(prefix + textwrap.dedent(code), limits=limits)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user that nobody may end."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        assert process.poll() is None
        process.kill()


# Processes


def test_a_fork_bomb_stops_at_the_limit_and_leaves_nothing(marked: Marked) -> None:
    code = """
    import os, time
    for _ in range(6):  # 64 processes, were there no limit
        try:
            os.fork()
        except OSError:
            pass
    time.sleep(60)
    """
    with marked.counted():
        result = attack(code, SandboxLimits(timeout_s=2.0, processes=8), prefix=marked.prefix)
    assert result.timed_out
    assert 2 <= marked.most <= 8
    assert marked.alive() == []


def test_threads_count_as_processes() -> None:
    code = """
    import threading, time
    started = 0
    try:
        for _ in range(50):
            threading.Thread(target=time.sleep, args=(1.0,)).start()
            started += 1
    except RuntimeError:
        pass
    print(started)
    """
    assert int(attack(code).stdout) < 8


def test_a_daemon_that_forks_twice_does_not_outlive_its_program(marked: Marked) -> None:
    code = """
    import os, signal, time
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for descriptor in range(3):
                os.close(descriptor)
            time.sleep(60)
        os._exit(0)
    time.sleep(1.0)
    print("started")
    """
    with marked.counted():
        result = attack(code, prefix=marked.prefix)
    assert (result.stdout, result.exit_code) == ("started\n", 0)
    assert marked.most >= 2
    assert marked.alive() == []


def test_a_program_that_ignores_every_signal_ends_at_the_timeout(marked: Marked) -> None:
    code = """
    import signal, time
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    while True:
        time.sleep(60)
    """
    result = attack(code, SandboxLimits(timeout_s=0.7), prefix=marked.prefix)
    assert result.timed_out
    assert marked.alive() == []


def test_no_process_outside_can_be_signalled(bystander: subprocess.Popen[bytes]) -> None:
    code = f"""
    import os, signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for pid in ({os.getpid()}, {os.getppid()}, {bystander.pid}, os.getppid(), 1, 0, -1, -{os.getpgrp()}):
        for number in (signal.SIGTERM, signal.SIGCONT):
            try:
                os.kill(pid, number)
            except OSError:
                pass
    for pid in (1, {bystander.pid}, {os.getpid()}):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    print("end")
    """
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        result = attack(code)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.stdout == "end\n"
    assert received == []
    assert bystander.poll() is None


def test_killing_every_process_it_can_see_ends_only_the_program(bystander: subprocess.Popen[bytes]) -> None:
    result = attack("import os, signal\nos.kill(0, signal.SIGKILL)")
    assert result.signal == signal.SIGKILL
    assert bystander.poll() is None


def test_the_sandbox_ends_with_the_process_that_started_it(marked: Marked) -> None:
    caller = f"""
from troupe.workers.agents.sandbox.run import run_python
from troupe.workers.agents.sandbox.run import SandboxLimits
run_python({marked.prefix!r} + "import time; time.sleep(60)", limits=SandboxLimits(timeout_s=60))
"""
    with subprocess.Popen([sys.executable, "-c", caller], cwd=ROOT) as process:
        deadline = time.monotonic() + 20
        while not marked.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert marked.alive()
        process.kill()
        process.wait()
        deadline = time.monotonic() + 5
        while marked.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert marked.alive() == []


# Network


def test_a_local_server_cannot_be_reached() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as internet,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
        tempfile.TemporaryDirectory() as folder,
    ):
        path, port = f"{folder}/socket", internet.getsockname()[1]
        abstract.bind(f"\0troupe-test-{os.getpid()}")
        named.bind(path)
        os.chmod(path, 0o777)
        os.chmod(folder, 0o755)
        for server in (internet, abstract, named):
            server.listen()
            server.setblocking(False)
        code = f"""
        import socket
        for family, address in (
            (socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_INET, ("10.0.0.1", 80)),
            (socket.AF_UNIX, "\\0troupe-test-{os.getpid()}"), (socket.AF_UNIX, {path!r}),
        ):
            with socket.socket(family) as client:
                client.settimeout(0.5)
                try:
                    client.connect(address)
                    client.send(b"x")
                    print("reached", address)
                except OSError:
                    pass
        """
        result = attack(code)
        for server in (internet, abstract, named):
            with pytest.raises(BlockingIOError):
                server.accept()
    assert (result.stdout, result.exit_code) == ("", 0)


@pytest.mark.parametrize("family", [16, 17, 38, 40], ids=["netlink", "packet", "alg", "vsock"])
def test_sockets_of_other_kinds_are_refused(family: int) -> None:
    code = f"""
    import socket
    try:
        socket.socket({family}, socket.SOCK_DGRAM)
    except OSError as error:
        print(error.errno)
    """
    assert attack(code).stdout == "97\n"  # EAFNOSUPPORT


# What can be read


def test_the_parent_is_not_in_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    code = f"""
    import os
    print(sorted(name for name in os.listdir("/proc") if name.isdigit()), os.getpid())
    for pid in ({os.getpid()}, {os.getppid()}, 1, "self", "self/../1", "thread-self"):
        for name in ("environ", "cmdline", "maps", "mem", "fd/3", "root/etc/hostname", "cwd/README.md", "status"):
            try:
                with open(f"/proc/{{pid}}/{{name}}", "rb") as file:
                    print(pid, name, file.read(100_000))
            except OSError:
                pass
    """
    result = attack(code)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "['2'] 2"
    assert SECRET not in result.stdout
    assert "pytest" not in result.stdout
    assert not any(line.startswith(("1 ", "self/../1", f"{os.getpid()} ")) for line in result.stdout.splitlines())


def test_the_environment_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("LD_PRELOAD_X", SECRET)
    result = attack("import os\nprint(dict(os.environ))")
    assert SECRET not in result.stdout
    assert "HF_TOKEN" not in result.stdout


def test_files_of_the_home_the_repository_and_the_machine_are_hidden() -> None:
    name = f"secret-{os.getpid()}"
    places = [Path.home() / f".{name}", ROOT / f".{name}", Path(tempfile.gettempdir()) / name, Path("/dev/shm") / name]
    code = f"""
    import os
    for path in {[str(place) for place in places]!r} + ["/etc/shadow", "/etc/hostname", {str(ROOT / "README.md")!r}]:
        for way in ("", "/proc/self/root", "/tmp/../../..", "/proc/self/cwd/../"):
            try:
                print(path, open(way + path).read())
            except OSError:
                pass
    for folder, folders, files in os.walk("/", followlinks=True):
        folders[:] = [one for one in folders if os.path.join(folder, one) not in ("/usr", "/proc", "/nix")]
        if folder.count("/") > 5:
            folders.clear()
        for file in files:
            if {name!r} in file or file in ("shadow", "docker.sock"):
                print("found", folder, file)
    print(os.path.exists("/run"), os.path.exists("/var"), os.path.exists("/sys"))
    """
    try:
        for place in places:
            place.write_text(SECRET)
            place.chmod(0o644)
        result = attack(code, replace(SMALL, timeout_s=60.0))  # it reads every folder
    finally:
        for place in places:
            place.unlink(missing_ok=True)
    assert (result.stdout, result.exit_code) == ("False False False\n", 0)


def test_descriptors_of_the_caller_are_not_inherited(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    descriptors = [os.open(tmp_path / "secret", os.O_RDWR) for _ in range(5)]
    code = """
    import os
    for descriptor in range(3, 200):
        for read in (lambda: os.pread(descriptor, 1000, 0), lambda: os.readlink(f"/proc/self/fd/{descriptor}")):
            try:
                print(descriptor, read())
            except OSError:
                pass
        try:
            os.write(descriptor, b"overwritten")
        except OSError:
            pass
    """
    try:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, True)
        result = attack(code)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert (result.stdout, result.exit_code) == ("", 0)
    assert (tmp_path / "secret").read_text() == SECRET


# What can be written


def test_nothing_outside_can_be_written(tmp_path: Path) -> None:
    name = f"troupe-attack-{os.getpid()}"
    folders = [
        ROOT,
        Path.home(),
        tmp_path,
        Path("/tmp"),
        Path("/dev/shm"),
        Path("/var/tmp"),
        Path("/usr/lib"),
        Path("/"),
    ]
    folders += [Path("/etc"), Path(sys.base_prefix), Path(sys.base_prefix) / "lib", Path("/program"), Path("/dev")]
    code = f"""
    import os
    written = []
    for folder in {[str(folder) for folder in folders]!r}:
        for way in ("", "/proc/self/root", "/tmp/../.."):
            try:
                with open(f"{{way}}{{folder}}/{name}", "w") as file:
                    file.write("x")
                written.append(folder)
            except OSError:
                pass
            try:
                os.chmod(way + folder, 0o777)
                os.utime(way + folder, (0, 0))
            except OSError:
                pass
    print(sorted(set(written)))
    """
    modes = {folder: folder.stat().st_mode for folder in folders if folder.exists()}
    result = attack(code)
    assert result.stdout == "['/dev/shm', '/tmp']\n"  # its own
    assert [folder for folder in folders if (folder / name).exists()] == []
    assert {folder: folder.stat().st_mode for folder in modes} == modes
    assert attack(f"import os\nprint(os.listdir('/tmp'), os.path.exists('/tmp/{name}'))").stdout == "[] False\n"


def test_links_out_of_the_working_directory_lead_nowhere(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text(SECRET)
    tmp_path.chmod(0o777)
    target.chmod(0o666)
    code = f"""
    import os
    for number, path in enumerate([{str(target)!r}, "../" * 20 + {str(target)!r}, "/proc/1/root" + {str(target)!r},
                                   "/proc/self/root" + {str(target)!r}]):
        os.symlink(path, f"link{{number}}")
        for mode in ("r", "w", "a"):
            try:
                with open(f"link{{number}}", mode) as file:
                    print(file.read() if mode == "r" else file.write("overwritten"))
            except OSError:
                pass
        try:
            os.link(path, f"hard{{number}}")
            print("linked")
        except OSError:
            pass
    """
    result = attack(code)
    assert (result.stdout, result.exit_code) == ("", 0)
    assert target.read_text() == SECRET


def test_a_large_file_stops_at_the_size_of_the_disk(tmp_path: Path) -> None:
    code = """
    import os
    total = 0
    for number in range(20):
        with open(f"/tmp/{number}", "wb", buffering=0) as file:
            try:
                for _ in range(10):
                    total += file.write(bytes(2**20))
            except OSError:
                pass
    try:
        os.truncate("/tmp/0", 10 * 2**30)
        print("grew")
    except OSError:
        pass
    state = os.statvfs("/tmp")
    print(total, state.f_blocks * state.f_frsize)
    """
    before = Path("/proc/meminfo").read_text()
    result = attack(code)
    total, size = map(int, result.stdout.split())
    assert total <= 8 * 2**20 == size
    shared = [int(text.partition("Shmem:")[2].split()[0]) for text in (before, Path("/proc/meminfo").read_text())]
    assert shared[1] - shared[0] < 64 * 1024  # KiB; the file system is gone


def test_the_number_of_files_is_bounded() -> None:
    code = """
    import os
    made = 0
    try:
        for made in range(5000):
            os.mkdir("d")
            os.chdir("d")
    except OSError as error:
        print(made, error.errno)
    """
    result = attack(code, SandboxLimits(files=1000, timeout_s=10.0))
    assert 900 < int(result.stdout.split()[0]) <= 1000


# Memory and output


def test_10_gb_are_not_allocated() -> None:
    result = attack("data = bytearray(10 * 2**30)\nprint(len(data))")
    assert (result.stdout, result.exit_code, result.out_of_memory) == ("", 1, True)
    names = attack("import sys\nsys.exit('MemoryErrors: none')")
    assert (names.exit_code, names.out_of_memory) == (1, False)


def test_the_memory_of_all_processes_together_is_bounded(marked: Marked) -> None:
    code = """
    import os, time
    for _ in range(5):
        if os.fork() == 0:
            data = b"x" * (70 * 2**20)
            time.sleep(20)
            os._exit(0)
    time.sleep(20)
    """
    result = attack(code, SandboxLimits(timeout_s=20.0, memory_mib=160), prefix=marked.prefix)
    assert result.out_of_memory and not result.timed_out
    assert marked.alive() == []


def test_memory_that_belongs_to_no_process_is_refused() -> None:
    """Unmapped but for a page, or only inherited, such memory would stay and be in no process's size."""
    code = """
    import ctypes, mmap, os, socket
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        os.memfd_create("x")
        print("memfd")
    except OSError:
        pass
    print(libc.shmget(0, 2**20, 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600))
    read, write = os.pipe()
    print(libc.vmsplice(write, (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.create_string_buffer(4096)), 4096), 1, 0))
    print(libc.prctl(42, 0, 0, 0, 0), libc.prctl(41, 0, 0, 0, 0))  # huge pages are off, and stay off
    for option in (7, 8, 32, 33):
        try:
            socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, option, 2**26)
            print("buffer of", option)
        except OSError:
            pass
    HUGETLB, POPULATE = 0x40000, 0x8000
    for flags in (mmap.MAP_SHARED, mmap.MAP_SHARED | POPULATE, mmap.MAP_PRIVATE | HUGETLB, mmap.MAP_PRIVATE):
        try:
            with mmap.mmap(-1, 2**20, flags | mmap.MAP_ANONYMOUS) as memory:
                print("mapped", len(memory))
        except OSError as error:
            print(error)
    for device in sorted(os.listdir("/dev")):
        try:
            file = os.open(f"/dev/{device}", os.O_RDWR)
            mmap.mmap(file, 2**20)
            print("mapped", device)
        except OSError:
            pass
    """
    refused = ["-1 -1 -1", "-1", "1 -1", *["[Errno 1] Operation not permitted"] * 3]
    assert attack(code).stdout.splitlines() == [*refused, "mapped 1048576"]


@pytest.mark.parametrize("kind", ["waiting to be accepted", "of datagrams"])
def test_what_sockets_may_hold_counts(kind: str, marked: Marked) -> None:
    """What was written to them is in the memory of no process, and some are open in none."""
    code = f"""
    import socket, time
    if {kind!r} == "waiting to be accepted":
        server = socket.socket(socket.AF_UNIX)
        server.bind("/tmp/s")
        server.listen(4096)
        for _ in range(600):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect("/tmp/s")
                client.send(b"x")
    else:
        kept = [socket.socketpair(type=socket.SOCK_DGRAM) for _ in range(28)]
    time.sleep(5)
    """
    result = attack(code, replace(SMALL, timeout_s=20.0), prefix=marked.prefix)
    assert result.out_of_memory and not result.timed_out, result


def test_a_few_sockets_are_within_the_limit_of_the_memory() -> None:
    code = "import asyncio\nprint(asyncio.run(asyncio.sleep(0.2, 'slept')))"
    result = attack(code)
    assert result.stdout == "slept\n" and not result.out_of_memory, result


def test_processes_share_memory_in_files_within_the_limit_of_the_disk() -> None:
    code = """
    import multiprocessing
    from multiprocessing.shared_memory import SharedMemory

    def work(number, total, name):
        with total.get_lock():
            total.value += number
        memory = SharedMemory(name)
        memory.buf[number] = number
        memory.close()
        return number

    multiprocessing.set_start_method("fork")
    total, memory = multiprocessing.Value("i", 0), SharedMemory(create=True, size=2**20)
    workers = [multiprocessing.Process(target=work, args=(number, total, memory.name)) for number in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(total.value, list(memory.buf[:3]), open("/dev/zero", "rb").read(2))
    memory.close()
    memory.unlink()
    try:
        multiprocessing.heap.Arena(2**30)
    except OSError as error:
        print(error.strerror)
    """
    result = attack(code, SandboxLimits(timeout_s=20.0, memory_mib=160))
    assert result.stdout.splitlines() == ["3 [0, 1, 2] b'\\x00\\x00'", "File too large"], result


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_counted_and_discarded(stream: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = attack(f"import sys\nwhile True:\n    sys.{stream}.write('x' * 65536)", SandboxLimits(timeout_s=1.5))
    text = getattr(result, stream)
    assert result.timed_out
    assert text == "x" * 64 * 1024
    assert getattr(result, f"{stream}_discarded") > 2**20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_escape_sequences_in_the_output_are_data() -> None:
    text = "\x1b]0;title\x07\x1b[2J\x1b[31m\x00\r"
    assert attack(f"import sys\nsys.stdout.write({text!r})").stdout == text


def test_the_program_has_no_terminal() -> None:
    code = """
    import fcntl, os, termios
    for path in ("/dev/tty", "/dev/console", "/dev/pts/0"):
        try:
            os.open(path, os.O_RDWR)
            print("opened", path)
        except OSError:
            pass
    for descriptor in range(3):
        try:
            fcntl.ioctl(descriptor, termios.TIOCSTI, b"x")
            print("typed")
        except OSError:
            pass
    """
    assert attack(code).stdout == ""


# Rights and the kernel


def test_no_namespace_can_be_made_and_nothing_mounted() -> None:
    code = """
    import ctypes, os, subprocess
    libc = ctypes.CDLL(None, use_errno=True)
    for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000):
        print(libc.unshare(flag), libc.syscall(56, flag | 17, 0, 0, 0, 0) if os.uname().machine == "x86_64" else -1)
    print(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None), libc.umount2(b"/proc", 2), libc.chroot(b"/tmp"))
    print(libc.setns(0, 0), libc.pivot_root(b"/", b"/tmp") if hasattr(libc, "pivot_root") else -1)
    print(subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode != 0)
    """
    lines = attack(code).stdout.split()
    assert set(lines) == {"-1", "True"}


def test_no_right_can_be_gained() -> None:
    code = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    print(libc.setuid(0), libc.setresuid(0, 0, 0), libc.setgid(0))
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    capabilities = [int(status[key], 16) for key in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")]
    print(*capabilities, int(status["NoNewPrivs"]))
    """
    assert attack(code).stdout == "-1 -1 -1\n0 0 0 0 0 1\n"


def test_no_process_can_be_traced(bystander: subprocess.Popen[bytes]) -> None:
    code = f"""
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in (1, {os.getpid()}, {bystander.pid}, os.getpid()):
        print(libc.ptrace(16, pid, 0, 0), libc.ptrace(0, 0, 0, 0), libc.process_vm_readv(pid, None, 0, None, 0, 0))
    """
    result = attack(code)
    assert set(result.stdout.split()) == {"-1"}
    assert "TracerPid:\t0" in Path(f"/proc/{bystander.pid}/status").read_text()


def test_limits_cannot_be_raised() -> None:
    code = """
    import resource
    for kind in ("AS", "NPROC", "FSIZE", "NOFILE", "CPU"):
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            print("raised", kind)
        except (OSError, ValueError):
            pass
    """
    assert attack(code).stdout == ""


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("import ctypes\nctypes.string_at(0)", signal.SIGSEGV),
        ("import os\nos.abort()", signal.SIGABRT),
    ],
)
def test_a_crash_is_a_result(code: str, number: int) -> None:
    result = attack(code)
    assert result.exit_code is None
    assert result.signal == number


def test_a_recursion_without_a_limit_ends_the_program_only() -> None:
    code = "import sys\nsys.setrecursionlimit(10**8)\nf = lambda x: [x].sort(key=lambda y: f(y))\nf(1)"
    assert not attack(code).ok


def test_the_rest_of_the_machine_still_works_after_the_attacks() -> None:
    assert threading.active_count() < 20
    assert run_python("print('fine')").stdout == "fine\n"


# As a normal user

NORMAL_USER = """
import json, os, subprocess, sys
from troupe.workers.agents.sandbox.run import SandboxLimits
from troupe.workers.agents.sandbox.run import check_sandbox, run_python
check_sandbox()
sleeper = subprocess.Popen(["sleep", "60"])
code = f'''
import json, os, signal
for pid in ({os.getpid()}, {sleeper.pid}, 1, os.getppid()):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
readable = []
for path in ("/proc/1/environ", "/proc/1/mem", "/proc/1/fd/4", "/etc/passwd", "/etc/hostname"):
    try:
        readable.append([path, open(path).read(100)])
    except OSError:
        pass
written = []
for folder in ("/", "/program", "/etc", "/dev", "/usr", "/usr/lib"):
    try:
        open(folder + "/x", "w")
        written.append(folder)
    except OSError:
        pass
children = 0
try:
    while children < 20:
        if os.fork() == 0:
            signal.pause()
        children += 1
except OSError:
    pass
print(json.dumps([readable, written, children, os.getuid()]))
'''
result = run_python(code, limits=SandboxLimits(processes=6))
print(json.dumps([os.getuid(), sleeper.poll(), result.stdout, result.stderr]))
sleeper.kill()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the tests run as a normal user already")
def test_a_normal_user_has_the_same_sandbox() -> None:
    python = "/usr/bin/python3"
    probe = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    if not os.path.exists(python) or subprocess.run(probe).returncode:
        pytest.skip("needs an interpreter (3.11 or newer) that a normal user can start, at /usr/bin/python3")
    done = subprocess.run(
        [python, "-B", "-c", NORMAL_USER],
        env={"PYTHONPATH": str(ROOT), "HOME": "/nonexistent", "PATH": "/usr/bin:/bin"},
        user=54321,
        group=54321,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    user, sleeper, stdout, stderr = json.loads(done.stdout)
    assert (user, sleeper, stderr) == (54321, None, "")
    readable, written, children, inside = json.loads(stdout)
    assert readable == [["/etc/passwd", "sandbox:x:1000:1000::/tmp:/bin/sh\n"]]
    assert (written, children, inside) == ([], 5, 1000)
