"""Tunes the matrix products of one file by TunableOp on the first visible GPU, and prints the solutions as JSON.

    python -m primus.tuning.gemm.tunableop_worker FILE

A process for each product: a solution that crashes the GPU's driver ends only its own. PyTorch's
`mgpu_tune_gemm_in_file` writes its results after the last product, so that a kill would lose all of them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from pathlib import Path

TOLERANCES = {"float": 1e-4, "tf32": 2e-3, "double": 1e-9, "BFloat16": 1.6e-2, "Half": 2e-3}
"""Largest difference between two solutions relative to the size of a typical element: two roundings of the result, and
for fp32 the order of the sum."""
CHECK_VARIABLE = "PYTORCH_TUNABLEOP_NUMERICAL_CHECK"


def main() -> int:
    """Tune, and print; the exit code is that of the process."""
    import torch
    from torch.cuda import tunable

    if torch.version.hip is None:
        reason = f"PyTorch {torch.__version__} is not built for ROCm: TunableOp has nothing to choose from"
        print(json.dumps({"unfit": reason}))
        return 0
    file = Path(sys.argv[1])
    _require_equal_results(file.read_text(encoding="utf-8"))
    tunable.enable(True)
    tunable.tuning_enable(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)  # PyTorch's, which name products that it cannot tune
        tunable.tune_gemm_in_file(str(file))
    torch.cuda.synchronize()
    results = list(tunable.get_results())
    if not results:
        print(caught[-1].message if caught else "TunableOp gave no result", file=sys.stderr)
        return 1
    print(json.dumps({"validators": list(tunable.get_validators()), "results": results}))
    return 0


def _require_equal_results(text: str) -> None:
    """Exclude solutions that compute something else than the default.

    Operands are random with variance 1, so that a typical element of the result is the square root of k.
    """
    from torch.cuda import tunable

    if CHECK_VARIABLE in os.environ:
        return
    if not hasattr(tunable, "set_numerical_check_tolerances"):
        os.environ[CHECK_VARIABLE] = "1"  # older versions of PyTorch have tolerances of their own
        return
    found = re.search(r"TunableOp_(\w+?)_[NT]{2},[nt]{2}_\d+_\d+_(\d+)", text)
    tolerance = TOLERANCES.get(found[1], TOLERANCES["BFloat16"]) if found else TOLERANCES["BFloat16"]
    size = int(found[2]) ** 0.5 if found else 1.0
    tunable.set_numerical_check_tolerances(True, tolerance * size, tolerance)


if __name__ == "__main__":
    sys.exit(main())
