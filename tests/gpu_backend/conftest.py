"""Torch, imported once and quietly; the modules here that need it are skipped where it is missing."""

import warnings

try:
    with warnings.catch_warnings():
        # A torch without numpy says so when it is first imported.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        import torch
except ImportError:
    collect_ignore = [
        f"test_{name}.py" for name in ("layout", "copier", "groups", "page_tables", "plan_tensors", "kv_io", "backend")
    ]
else:
    torch.set_num_threads(1)
