"""The norm of gradients on a CPU with the kernel of the patches of engines, in an interpreter of its own."""

import json
import subprocess
import sys

CODE = """
import json, torch
from primus.patches.torch_cpu_norm import apply
torch.set_num_threads(1)
apply()
large = torch.randn(4096, 1667, generator=torch.Generator().manual_seed(1))
exact = large.double().norm().item()
leaf = large[:8].clone().requires_grad_()
leaf.norm().backward()
print(json.dumps({
    "errors": [abs(norm.item() / exact - 1) for norm in (
        torch.linalg.vector_norm(large), torch.norm(large), torch._foreach_norm([large])[0],
        torch.nn.utils.get_total_norm([large]), large.t().norm(),
    )],
    "gradient": (leaf.grad - leaf.detach() / leaf.detach().norm()).abs().max().item(),
    "others": [
        abs(large[:, 0].norm(1).item() / large[:, 0].abs().sum().item() - 1) < 1e-4,
        list(torch.linalg.vector_norm(large, dim=1).shape) == [4096],
        torch.linalg.vector_norm(large, keepdim=True).dim() == 2,
        torch.linalg.vector_norm(large, dtype=torch.float64).item() == exact,
        large.bfloat16().norm().dtype == torch.bfloat16,
        torch.tensor([3 + 4j]).norm().item() == 5.0,
        torch.empty(0).norm().item() == 0.0,
        torch.full((5000,), float("nan")).norm().isnan().item(),
        torch.full((5000,), float("inf")).norm().isinf().item(),
    ],
}))
"""


def test_norms_of_large_tensors_are_exact_to_float32_and_all_other_norms_are_as_before() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert max(found["errors"]) < 2e-7
    assert found["gradient"] < 1e-8
    assert found["others"] == [True] * 9
    assert done.stderr == ""
