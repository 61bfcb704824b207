"""The logarithm of softmax on a CPU with the kernel of the patches of engines, in an interpreter of its own."""

import json
import subprocess
import sys

CODE = """
import json, torch
import torch.nn.functional as F
from primus.patches.torch_cpu_log_softmax import apply
torch.set_num_threads(1)
draw = torch.Generator().manual_seed(1)
small = [torch.randn(shape, generator=draw) for shape in ((3, 4), (600, 5), (2, 3, 511), (0, 700), ())]
before = [torch.log_softmax(each, 0) for each in small]
half = torch.randn(4, 700, generator=draw).bfloat16()
half_before = torch.log_softmax(half, 1)
logits = 3 * torch.randn(130, 12345, generator=draw)
logits[:, 7] += 15
targets = torch.randint(0, 12345, (130,), generator=draw)
exact = F.cross_entropy(logits.double(), targets, reduction="none").mean().item()
apply()
leaf = logits.clone().requires_grad_()
losses = F.cross_entropy(leaf, targets, reduction="none")
losses.sum().backward()
expected = torch.softmax(logits.double(), 1) - F.one_hot(targets, 12345)
print(json.dumps({
    "error": losses.double().mean().item() - exact,
    "strided": (torch.log_softmax(logits.t().contiguous().t(), 1) - torch.log_softmax(logits, 1)).abs().max().item(),
    "gradient": (leaf.grad - expected).abs().max().item(),
    "others": [torch.equal(torch.log_softmax(a, 0), b) for a, b in zip(small, before)]
    + [torch.equal(torch.log_softmax(half, 1), half_before)],
    "nan": torch.log_softmax(torch.full((2, 600), float("nan")), 1).isnan().all().item(),
}))
"""


def test_rows_of_a_large_vocabulary_are_exact_and_all_others_as_before() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert abs(found["error"]) < 1.5e-7
    assert found["others"] == [True] * 6 and found["nan"]
    assert done.stderr == ""
