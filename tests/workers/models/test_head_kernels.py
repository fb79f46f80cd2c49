"""The output head's kernels of a GPU, on the CPU: Triton's interpreter runs them in a process of its own.

Triton decides at its import whether it interprets, for its own functions too.
"""

from __future__ import annotations

import os
import subprocess
import sys

_ON_CPU = """
from tests.workers.models import test_heads
from troupe.workers.models import head_kernels, heads


def product(left, right, out=None):
    # torch has products of bfloat16 with a float32 result on a GPU only.
    found = left.float() @ right.float()
    return found if out is None else out.copy_(found)


def add_product(into, left, right):
    into += product(left, right)


head_kernels.product = product
heads._functions = lambda device: (head_kernels.sums, head_kernels.gradients, product, add_product)
# Tiles of 64 columns, the last one of 8, that a program reads in pieces; and the sizes of a GPU.
for head_kernels.GPU_TILE_COLUMNS, head_kernels._BLOCK in ((64, 16), (8192, 2048)):
    for factor, entropy_grad in ((1.0, False), (1 / 0.7, True)):
        # The interpreter truncates to bfloat16; a GPU rounds.
        test_heads.check_token_logprobs(factor, entropy_grad, rounding=1e-2)
        test_heads.test_those_of_whole_logits_are_as_exact_and_the_logits_stay(factor, entropy_grad)
    test_heads.test_logits_far_apart_and_infinite_ones()
    test_heads.test_a_frozen_head_gets_no_gradient_and_no_states_one_of_zero()
print("all hold")
"""


def test_the_kernels_pass_the_tests_of_the_head() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", _ON_CPU], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("all hold\n"), done.stderr[-3000:]
