"""A model whose file is loaded after the backend was looked up is traced again, with its recurrences as operators."""

from __future__ import annotations

import subprocess
import sys
import textwrap

LATE = """
    import torch

    torch.compile(torch.nn.Linear(2, 2), backend="ridgefill")  # looks the backend up
    torch._dynamo.reset()

    from tests.decoders import RECURRENT, token_ids
    from ridgefill_compile.recurrences.substitute import known_substitutions
    from ridgefill_compile.report import report

    assert not any(each.operator for each in known_substitutions())
    model = RECURRENT["qwen3_next"].build()
    options = {"route": "identity", "split": 2, "tail": 8, "min_fill": 8, "inner": "eager", "strict": True}
    model.compile(backend="ridgefill", options=options)
    for ids in (token_ids(40), token_ids(1)):
        with torch.no_grad():
            model(ids, use_cache=True, logits_to_keep=2)
    assert any(each.operator for each in known_substitutions())
    assert [graph.filled for graph in report(model).graphs] == [True, False], report(model)
    print("filled")
"""


def test_of_a_model_loaded_later() -> None:
    """In a process of its own: what is substituted once stays so."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(LATE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "filled"
