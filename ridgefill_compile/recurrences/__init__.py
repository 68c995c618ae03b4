"""Recurrences of decoders as single operators: one node a scan, whatever the length, which can leave outputs out.

    tiles, delta_rule, ...   the operators (`torch.ops.ridgefill.*`), in plain torch
    fla_kernels              the same on CUDA, where flash-linear-attention is installed
    table                    RECURRENCES: what the passes need to know of each
    block_index              a loop over rows that is no recurrence, in plain torch
    signatures               which functions of modelling files each operator can stand for
    samples                  what both are compared on
    substitute               puts them there while Dynamo traces, after holding each against the function it replaces

Models write their scans as Python loops over rows or chunks. Dynamo unrolls them: the graph grows with the prompt, and
every number of chunks compiles anew. An operator is one node, and its state can be had without its outputs.

Importing this registers the operators and changes nothing else.
"""

from __future__ import annotations

from ridgefill_compile.recurrences.table import RECURRENCES, Recurrence

__all__ = ["RECURRENCES", "Recurrence"]
