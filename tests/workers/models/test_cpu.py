"""Linear layers by oneDNN against torch's own."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from troupe.workers.models.cpu import OneDnnLinear, onednn_is_faster, use_onednn

AMD = "vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\n"
INTEL = "vendor_id\t: GenuineIntel\n"


def double(layer: nn.Linear) -> OneDnnLinear:
    """The same layer, by oneDNN."""
    other = OneDnnLinear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    other.load_state_dict(layer.state_dict())
    return other


def worked(layer: nn.Module, inputs: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """What comes out, and the gradients of all that goes in."""
    inputs = inputs.detach().requires_grad_()
    layer.zero_grad()
    result = layer(inputs)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(seed))
    (result * weights).sum().backward()
    assert inputs.grad is not None
    return [result.detach(), inputs.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@settings(max_examples=60, deadline=None)
@given(
    lead=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    wide=st.integers(1, 70),
    out=st.integers(1, 70),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_results_and_gradients_are_torchs(lead: list[int], wide: int, out: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(wide, out, bias=bias)
    inputs = torch.randn(*lead, wide)
    ours, theirs = worked(double(layer), inputs, seed), worked(layer, inputs, seed)
    assert len(ours) == len(theirs) == 3 + bias
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_inputs_may_have_any_memory_layout() -> None:
    layer = nn.Linear(6, 5)
    one, sliced = torch.randn(1, 1, 6).expand(3, 4, 6), torch.randn(3, 4, 12)[..., ::2]
    for inputs in (torch.randn(6, 4, 3).permute(2, 1, 0), one, sliced):
        for own, other in zip(worked(double(layer), inputs, 1), worked(layer, inputs, 1), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_row_has_the_same_result_alone_as_among_others(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    layer, inputs = double(nn.Linear(64, 64)), torch.randn(9, 64)
    assert torch.equal(layer(inputs[4].view(*shape, 64)), layer(inputs)[4].view(*shape, 64))


def test_only_requested_gradients_are_computed() -> None:
    layer = double(nn.Linear(4, 3)).requires_grad_(False)
    inputs = torch.randn(2, 4, requires_grad=True)
    layer(inputs).sum().backward()  # a gradient of ones that is one number in memory
    assert inputs.grad is not None and layer.weight.grad is None and layer.bias.grad is None
    torch.testing.assert_close(inputs.grad, layer.weight.sum(0).expand(2, 4))
    with torch.no_grad():
        assert not layer(inputs).requires_grad


@pytest.mark.parametrize(("dtype", "swapped"), [(torch.float32, True), (torch.bfloat16, False)])
def test_float32_layers_are_swapped_in_place(
    dtype: torch.dtype, swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("troupe.workers.models.cpu.onednn_is_faster", lambda: True)

    class Own(nn.Linear):
        """A subclass multiplies as it likes."""

    model = nn.Sequential(nn.Linear(4, 3), Own(3, 3), nn.Linear(3, 2)).to(dtype)
    names, weights = list(model.state_dict()), [id(parameter) for parameter in model.parameters()]
    use_onednn(model)
    assert [type(module) is OneDnnLinear for module in model] == [swapped, False, swapped]
    assert list(model.state_dict()) == names and [id(parameter) for parameter in model.parameters()] == weights


def test_onednn_is_used_on_processors_without_mkl_avx512(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    amd, intel = tmp_path / "amd", tmp_path / "intel"
    amd.write_text(AMD)
    intel.write_text(INTEL)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert onednn_is_faster(amd) == (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available())
    assert not onednn_is_faster(intel)
    assert not onednn_is_faster(tmp_path / "nowhere")
    onednn_is_faster.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not onednn_is_faster(amd)


def test_layers_are_kept_where_torchs_default_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troupe.workers.models.cpu.onednn_is_faster", lambda: False)
    model = nn.Sequential(nn.Linear(4, 3))
    use_onednn(model)
    assert type(model[0]) is nn.Linear


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the calls")

SCRIPT = """
import resource
import torch
from troupe.workers.models.cpu import return_large

def resident():
    with open("/proc/self/statm") as lines:
        return int(lines.read().split()[1]) * 4096 / 2**20

def new_pages(number, times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(number)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

return_large()
torch.ones(1)  # torch's own threads and buffers
start = resident()
tensors = [torch.ones(2**22) for _ in range(4)]
held = resident() - start
del tensors[:-1]  # the last one is at the top, and would hold up the others
freed = resident() - start
new_pages(2**20, 1)
print(held, freed, new_pages(2**20, 100), new_pages(2**22, 20))
"""


def test_large_blocks_are_returned_at_once_and_others_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    held, freed, small, large = (float(word) for word in done.stdout.split())
    assert held > 60 and freed < 24
    assert small < 15 * 4 * 2**20 / 4096, "a hundred blocks of 4 MiB in the memory of a few"
    assert large >= 20 * 16 / 2, "those of 16 MiB are new each time, maybe in huge pages"
