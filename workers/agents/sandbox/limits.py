"""What a sandboxed program may use, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class SandboxLimits:
    """Bounds of one program and of everything that it starts."""

    timeout_s: float = 5.0
    """Wall-clock seconds of the program, with the start of its interpreter, without the start of the sandbox. Then
    everything in the sandbox is killed."""
    memory_mib: int = 512
    """Address space of a process, and private memory of all processes together."""
    disk_mib: int = 64
    """Size of the writable file system, which is in memory, and of a file in it."""
    files: int = 4096
    """Files and folders in the writable file system."""
    processes: int = 16
    """Processes and threads at the same time."""
    open_files: int = 64
    """Open files of a process."""
    output_kib: int = 64
    """Output that is kept, of stdout and of stderr each; what exceeds it is counted and discarded."""
    packages: bool = False
    """Whether the program may import the packages that are installed with Troupe, such as numpy. False: the standard
    library only."""

    def __post_init__(self) -> None:
        """Refuse limits that are not positive, and less memory than an interpreter takes."""
        for field in fields(self):
            if getattr(self, field.name) <= 0 and field.name != "packages":
                raise ValueError(f"{field.name} must be positive, not {getattr(self, field.name)}")
        if self.memory_mib < 64:
            raise ValueError(f"memory_mib must be at least 64, not {self.memory_mib}")


@dataclass(frozen=True)
class SandboxResult:
    """What a sandboxed program did. Everything in it is data that the program chose: do not trust it."""

    stdout: str
    """The first part of what was written, up to the limit. Bytes that are not UTF-8 are replaced."""
    stderr: str
    """The last part of what was written, up to the limit: a traceback ends with its cause."""
    exit_code: int | None
    """Exit code of the program; None if a signal ended it."""
    signal: int | None = None
    """Signal that ended the program; None if it exited."""
    timed_out: bool = False
    """Whether the wall-clock limit ended it."""
    out_of_memory: bool = False
    """Whether all processes together exceeded the memory limit, or the program ended with a MemoryError."""
    stdout_discarded: int = 0
    """Bytes of stdout beyond the limit."""
    stderr_discarded: int = 0
    """Bytes of stderr beyond the limit."""
    wall_s: float = 0.0
    """Seconds from the start of the sandbox until nothing of it was left."""
    program_s: float = 0.0
    """Seconds from the start of the program until it ended or was killed: what `SandboxLimits.timeout_s` bounds."""

    @property
    def ok(self) -> bool:
        """Whether the program exited with code 0."""
        return self.exit_code == 0 and not self.timed_out
