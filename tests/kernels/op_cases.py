"""The operations of `Ops` and their kernels' launchers, with the sizes at which they are checked.

One table for every check: in Triton's interpreter (`test_ops`), and on a device (`tests.gpu`, stage `parity`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from batchgen.kernels.activation import ACTIVATIONS
from batchgen.kernels.counts import CountLists
from tests.kernels import op_arguments as make
from tests.kernels import op_exact as exact
from tests.kernels.closeness import DTYPES
from tests.kernels.numbers import LAYOUTS

Sizes = Mapping[str, Any]
Call = Callable[..., Any]
FLOAT32 = (torch.float32,)
ALL = frozenset("*")
SUMS: Mapping[str, tuple[float, float]] = {"*": (3e-7, 3e-6)}
"""Bounds of sums over logits: a few float32 roundings of a logit."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation, its arguments and its sizes."""

    name: str
    make: Callable[..., dict[str, Any]]
    """`make(numbers, dtype, **sizes)`: name -> argument, in the order of the operation's parameters."""
    small: Sequence[Sizes]
    """Sizes in the interpreter; the first are also those of a toy run of the GPU check."""
    large: Sequence[Sizes] = ()
    """Sizes on a device."""
    drawn: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Least and largest sizes of which the interpreter's test draws some at random."""
    dtypes: Sequence[torch.dtype] = DTYPES
    exact: Callable[..., Any] | None = None
    """The exact result from the arguments in float64; None: the plain operation's."""
    equal: frozenset[str] = frozenset()
    """Results and arguments that must be equal to the plain operation's; "*": all."""
    tolerance: float = 1e-5
    """Allowed error in float32, relative to each value and to the largest of all."""
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Largest errors of float32 results by name ("*": all), relative to each value and absolute, of every backend."""
    roundings: float = 0.0
    """Allowed error in addition to twice PyTorch's, in units of the dtype's precision relative to the largest value."""
    adapt: Callable[[Call], Call] = lambda call: call
    """Gives a call with all arguments by position."""
    toys: int = 1
    """Number of `small` sizes that a toy run uses."""


def _sizes(names: str, *rows: Sequence[Any]) -> list[Sizes]:
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


NORMS = [
    *_sizes("rows width", (3, 20), (5, 1), (5, 3), (5, 63), (5, 576), (5, 1000), (2, 16384)),
    *_sizes("rows width", (1, 13), (128, 13), (129, 13), (300, 13), (0, 8)),
]
_LAYER = {"rows": 5, "experts": 4, "chosen": 2, "hidden": 24, "inner": 18}
VOCABULARIES = _sizes("rows vocab", (256, 151936), (64, 128256), (1, 32000), (77, 257))
ROWS = _sizes("rows vocab", (3, 150), (1, 1), (3, 2), (2, 63), (5, 100), (1, 5000))
NONE: Sizes = {"rows": 0, "vocab": 100}
KINDS: list[Sizes] = [
    *({"rows": 3, "vocab": 130, "layout": layout} for layout in LAYOUTS),
    *({"rows": rows, "vocab": 65, "kind": kind} for rows, kind in ((6, "ties"), (4, "equal"))),
    NONE,
]
ANY_ROWS = {"rows": (1, 6), "vocab": (1, 200)}


def _with(sizes: Sequence[Sizes], **more: Sequence[Any]) -> list[Sizes]:
    """Each of the sizes with each of the values of one more."""
    ((name, values),) = more.items()
    return [{**one, name: value} for one in sizes for value in values]


def _clearing_slot_0(count_tokens: Call) -> Call:
    """Slot 0 of the lists is unused: any values may be written to it."""

    def run(lists: CountLists, *others: Any) -> None:
        count_tokens(lists, *others)
        for column in (lists.ids, lists.counts, lists.used):
            column[:1].zero_()  # `column[0] = 0` would wait for a GPU

    return run


def _tokens(sample: Call) -> Call:
    """PyTorch's does not check the rows."""
    return lambda *arguments: sample(*arguments).tokens


OPERATIONS = (
    Operation(
        "rms_norm",
        make.norm,
        [
            *NORMS,
            *_sizes(
                "rows width layout", (6, 16, "heads"), (6, 80, "heads"), (7, 20, "every second"), (7, 20, "padded")
            ),
            *_sizes("rows width scale", (3, 33, 1e-3), (3, 33, 1e3), (3, 33, 0.0), (2, 40, 15_000.0)),
            {"rows": 3, "width": 33, "scale": 1e-4, "eps": 0.1},
        ],
        [
            *_sizes("rows width", (256, 1024), (1, 4096), (8192, 2048), (77, 5120), (63, 576), (3, 100)),
            {"rows": 256, "width": 128, "layout": "heads"},
        ],
        {"rows": (1, 40), "width": (1, 300)},
        exact=exact.norm,
    ),
    Operation(
        "add_rms_norm",
        make.add_norm,
        [
            *NORMS,
            *_sizes("rows width layout", (7, 20, "every second"), (7, 20, "padded")),
        ],
        _sizes("rows width", (256, 1024), (4099, 4096), (7, 576)),
        {"rows": (1, 40), "width": (1, 300)},
        equal=frozenset({"x", "delta"}),
        exact=exact.add_norm,
    ),
    Operation(
        "gated",
        make.gated,
        [
            *_with(_sizes("rows width", (3, 37)), activation=list(ACTIVATIONS)),
            *_sizes("rows width", (2, 1), (2, 63), (2, 1023), (2, 1024), (2, 1025), (2, 2100), (0, 6)),
            *_sizes("rows width layout", (6, 21, "padded"), (6, 21, "every second")),
        ],
        _with(
            _sizes("rows width", (256, 3072), (4096, 14336), (5, 1001)),
            activation=["silu", "gelu", "gelu_pytorch_tanh", "relu", "quick_gelu"],
        ),
        {"rows": (1, 9), "width": (1, 200)},
        exact=exact.gated,
    ),
    Operation(
        "qk_norm_rope_cache",
        make.heads,
        [
            *_sizes("rows heads kv_heads dim normed", (3, 3, 1, 16, 1), (3, 3, 1, 16, 0)),
            *_with(
                _sizes(
                    "rows heads kv_heads dim",
                    *((5, 1, 1, 2), (5, 3, 1, 6), (5, 14, 2, 24), (5, 4, 4, 64), (5, 5, 5, 80), (5, 33, 1, 32)),
                    (5, 2, 1, 256),
                ),
                normed=[0, 1],
            ),
            *_sizes("rows heads kv_heads dim page", (1, 4, 2, 8, 1), (2, 4, 2, 8, 3), (17, 4, 2, 8, 16)),
            {"rows": 5, "heads": 3, "kv_heads": 1, "dim": 8, "gaps": 2},
            {"rows": 0, "heads": 2, "kv_heads": 1, "dim": 4},
        ],
        _sizes(
            "rows heads kv_heads dim normed",
            *((256, 16, 8, 128, 1), (2048, 32, 8, 128, 0), (33, 9, 3, 64, 0), (5, 4, 1, 80, 1), (70, 4, 2, 256, 1)),
        ),
        {"rows": (1, 8), "heads": (1, 12), "kv_heads": (1, 4), "dim": (2, 80), "normed": (0, 1), "page": (1, 9)},
        equal=frozenset({"values", "qkv"}),
        toys=2,
        exact=exact.heads,
    ),
    Operation(
        "rope_tables",
        make.rope,
        _sizes("rows dim", (3, 16), (5, 2), (5, 6), (5, 128), (5, 256), (1, 80), (8, 80), (9, 80), (100, 80), (0, 8)),
        _sizes("rows dim", (256, 128), (4097, 64), (1, 80)),
        {"rows": (1, 40), "dim": (2, 140)},
        exact=exact.rope,
    ),
    Operation(
        "linear",
        make.linear,
        [
            *_sizes(
                "rows inputs outputs", (3, 20, 24), (1, 64, 64), (65, 100, 63), (3, 1, 1), (17, 33, 130), (0, 40, 24)
            ),
            {"rows": 9 * 64 + 1, "inputs": 8, "outputs": 70},  # an edge of the band of tiles
            *_with(_sizes("rows inputs outputs", (9, 20, 48)), layout=LAYOUTS[1:]),
        ],
        _sizes("rows inputs outputs", (256, 1024, 4096), (65, 100, 63), (1, 4096, 6144)),
        drawn={"rows": (1, 80), "inputs": (1, 150), "outputs": (1, 150)},
        exact=exact.linear,
    ),
    Operation("log_normalizers", make.logits, [*ROWS, *KINDS], VOCABULARIES, ANY_ROWS, exact=exact.lse, bounds=SUMS),
    Operation("argmax_lse", make.logits, [*ROWS, *KINDS], VOCABULARIES, ANY_ROWS, exact=exact.argmax, bounds=SUMS),
    Operation(
        "token_logprobs",
        make.token_logprobs,
        [*_with(ROWS, known=[0, 1]), *KINDS],
        _with(VOCABULARIES, known=[0, 1]),
        exact=exact.tokens,
        bounds=SUMS,
        toys=2,
    ),
    Operation(
        "top_logprobs",
        make.top,
        [*_sizes("rows vocab k", (3, 150, 5), (2, 3, 3), (2, 63, 17)), *_with(KINDS, k=[5])],
        _with(VOCABULARIES, k=[1, 20]),
        {**ANY_ROWS, "k": (1, 18)},
        exact=exact.top,
        bounds=SUMS,
    ),
    Operation(
        "gather_logprobs",
        make.gather,
        [*_with(_sizes("rows vocab", (3, 150)), k=[0, 3, 1, 5, 17]), *_with(KINDS, k=[5])],
        _with(VOCABULARIES, k=[20]),
        {**ANY_ROWS, "k": (1, 18)},
        exact=exact.gather,
        bounds=SUMS,
        toys=2,
    ),
    Operation(
        "largest",
        make.top,
        [
            *_sizes("rows vocab k", (3, 150, 7), (3, 1, 1), (2, 7, 7), (1, 63, 3), (2, 100, 16), (1, 333, 9)),
            *_with(_sizes("rows vocab kind", (2, 5, "ties"), (2, 64, "ties"), (2, 300, "ties")), k=[2, 16]),
            *_sizes("rows vocab kind k", (5, 150, "equal", 10), (1, 200, "rising", 13), (1, 200, "falling", 13)),
            {**NONE, "k": 5},
            *_with(_sizes("rows vocab layout", *((3, 201, layout) for layout in LAYOUTS)), k=[6]),
            {"rows": 3, "vocab": 201, "k": 17},
        ],
        _with(VOCABULARIES, k=[1, 50, 200]),
        {**ANY_ROWS, "k": (1, 17)},
        equal=ALL,
    ),
    Operation(
        "mask_tokens",
        make.mask,
        _with([*ROWS, *KINDS], pairs=[4, 70, 0]),
        _with(VOCABULARIES, pairs=[40]),
        equal=ALL,
    ),
    Operation("drew_masked", make.masked_draws, [*ROWS, *KINDS, {"rows": 200, "vocab": 33}], VOCABULARIES, equal=ALL),
    Operation(
        "apply_bitmask",
        make.bitmask,
        [
            *_with([*ROWS, {"rows": 3, "vocab": 32}, {"rows": 3, "vocab": 33}], some=[0, 1]),
            *KINDS,
            {"rows": 2, "vocab": 5000},
        ],
        _with(VOCABULARIES, some=[0, 1]),
        {**ANY_ROWS, "some": (0, 1)},
        equal=ALL,
        toys=2,
    ),
    Operation(
        "add_bias",
        make.bias,
        _with([*ROWS, *KINDS], pairs=[9, 200, 0]),
        _with(VOCABULARIES, pairs=[300]),
        dtypes=FLOAT32,
        tolerance=1e-6,
        exact=exact.bias,
    ),
    Operation(
        "keep_only",
        make.keep,
        [*_with([*ROWS, *KINDS], pairs=[4, 70, 0]), {"rows": 4, "vocab": 5000, "pairs": 200}],
        _with(VOCABULARIES, pairs=[40]),
        equal=ALL,
    ),
    Operation(
        "count_tokens",
        make.count,
        _with([*ROWS, {"rows": 5, "vocab": 5000}, NONE], tokens=[9, 2500]),
        _with(VOCABULARIES, tokens=[1500]),
        dtypes=FLOAT32,
        equal=ALL,
        adapt=_clearing_slot_0,
    ),
    Operation(
        "penalise",
        make.penalise,
        [*_with([*ROWS, *KINDS], tokens=[9]), {"rows": 3, "vocab": 2000, "tokens": 900}],
        _with(VOCABULARIES, tokens=[300]),
        dtypes=FLOAT32,
        tolerance=2e-7,
        exact=exact.penalise,
    ),
    Operation(
        "row_keys",
        make.row_keys,
        _sizes("rows", (5,), (1,), (127,), (128,), (129,), (300,)),
        _sizes("rows", (256,), (1,), (4099,)),
        dtypes=FLOAT32,
        equal=ALL,
    ),
    Operation(
        "nan_rows",
        make.bad_rows,
        _sizes("rows vocab", (4, 150), (3, 4), (7, 65), (7, 305)),
        _sizes("rows vocab", (256, 151936), (3, 32001)),
        equal=ALL,
    ),
    Operation(
        "add_lora",
        make.lora,
        [
            *_sizes("rows adapters rank inputs outputs", (5, 3, 4, 24, 20), (1, 1, 4, 16, 16), (5, 2, 8, 33, 7)),
            *_sizes(
                "rows adapters rank inputs outputs", (19, 3, 64, 100, 130), (23, 4, 33, 63, 257), (9, 2, 130, 40, 48)
            ),
            *_sizes("rows adapters rank inputs outputs", (63, 1, 5, 32, 24), (64, 1, 5, 32, 24), (200, 1, 5, 32, 24)),
            *_sizes(
                "rows adapters rank inputs outputs", (4, 2, 16, 512, 24), (4, 2, 16, 1000, 24), (4, 2, 16, 1537, 24)
            ),
            *_with(_sizes("rows adapters rank inputs outputs", (5, 2, 7, 12, 10)), layout=LAYOUTS[1:2]),
        ],
        _sizes(
            "rows adapters rank inputs outputs",
            *((256, 8, 16, 1024, 4096), (256, 64, 16, 2048, 2048), (1000, 3, 64, 4096, 1024), (7, 2, 5, 576, 321)),
        ),
        {"rows": (1, 24), "adapters": (1, 4), "rank": (1, 20), "inputs": (1, 70), "outputs": (1, 140)},
        roundings=2.0,
        exact=exact.lora,
    ),
    Operation(
        "route",
        make.route,
        _sizes(
            "rows experts rules",
            *((3, 8, "mixtral"), (5, 128, "qwen3"), (5, 60, "qwen2"), (5, 16, "deepseek_v2")),
            *((5, 256, "deepseek_v3"), (5, 4, "one"), (5, 64, "biased softmax"), (5, 24, "sigmoid")),
            *((5, 12, "three groups"), (5, 12, "best two")),
        ),
        _sizes(
            "rows experts rules",
            *((256, 8, "mixtral"), (256, 128, "qwen3"), (256, 60, "qwen2"), (256, 160, "deepseek_v2")),
            *((256, 256, "deepseek_v3"), (1, 128, "qwen3"), (4099, 256, "deepseek_v3")),
        ),
        exact=exact.route,
        tolerance=1e-6,
    ),
    Operation(
        "moe_experts",
        make.experts,
        [
            *_sizes("rows experts chosen hidden inner", (3, 4, 2, 24, 20), (1, 4, 1, 16, 16), (7, 4, 2, 33, 20)),
            *_sizes("rows experts chosen hidden inner", (13, 8, 3, 64, 48), (19, 5, 5, 40, 17), (3, 9, 8, 100, 40)),
            {"rows": 5, "experts": 64, "chosen": 8, "hidden": 16, "inner": 8},
            *(
                {**_LAYER, "gating": name, "biased": i % 2, "transposed": i // 2 % 2}
                for i, name in enumerate(make.GATINGS)
            ),
            *_sizes("rows experts chosen hidden inner spread", (17, 5, 1, 20, 12, 0), (40, 1, 1, 20, 12, 0)),
            {"rows": 0, "experts": 4, "chosen": 2, "hidden": 8, "inner": 6},
        ],
        [
            *_sizes("rows experts chosen hidden inner", (256, 128, 8, 2048, 768), (1, 8, 2, 1024, 1792)),
            {"rows": 1000, "experts": 8, "chosen": 2, "hidden": 1024, "inner": 1792},
            {"rows": 33, "experts": 32, "chosen": 4, "hidden": 720, "inner": 360}
            | {"gating": "gpt_oss", "biased": 1, "transposed": 1},
        ],
        {"rows": (1, 24), "experts": (1, 9), "chosen": (1, 4), "hidden": (1, 70), "inner": (1, 40)},
        exact=exact.experts,
    ),
    Operation(
        "merge_parts",
        make.merge_parts,
        [
            *_with(_sizes("rows heads dim", (3, 3, 16), (5, 9, 64)), sinks=[0, 1]),
            *_sizes(
                "rows heads dim sinks",
                (5, 1, 16, 0),
                (5, 3, 80, 0),
                (5, 16, 128, 0),
                (5, 5, 7, 1),
                (5, 2, 256, 1),
                (0, 2, 8, 0),
            ),
        ],
        _sizes("rows heads dim sinks", (256, 32, 128, 0), (1025, 16, 64, 1), (3, 7, 80, 0)),
        exact=exact.parts,
        bounds={"result 1": (1e-6, 1e-5)},
        adapt=lambda call: lambda a, lse_a, b, lse_b, dtype, sinks: call(a, lse_a, b, lse_b, dtype=dtype, sinks=sinks),
    ),
    Operation(
        "merge_lists",
        make.merge_lists,
        [
            *_with(_sizes("rows heads dim most", (3, 3, 16, 3), (4, 9, 80, 5), (1, 40, 128, 12)), sinks=[1, 0]),
        ],
        _sizes("rows heads dim most sinks", (256, 32, 128, 6, 0), (33, 16, 64, 40, 1)),
        {"rows": (1, 5), "heads": (1, 17), "dim": (1, 70), "most": (1, 6), "sinks": (0, 1)},
        exact=exact.lists,
        bounds={"lse": (1e-6, 1e-5)},
    ),
    Operation(
        "sample", make.sample, _sizes("vocab drawn", (1, 0), (63, 0), (300, 0), (300, 5)), equal=ALL, adapt=_tokens
    ),
    Operation("filtered_scores", make.filtered, _sizes("vocab", (1,), (63,), (300,)), dtypes=FLOAT32, tolerance=1e-6),
    Operation(
        "causal_conv",
        make.conv_runs,
        _sizes("lengths channels width", ((1,), 5, 3), ((7, 1, 6), 64, 4), ((2, 130), 33, 3), ((65, 64, 3), 8, 2)),
        _sizes("lengths channels width", ((300, 5, 1000), 8192, 4), ((300,), 2049, 3)),
        exact=exact.conv_runs,
        bounds={"*": (1e-5, 1e-5)},
    ),
    Operation(
        "linear_attention",
        make.linear_attention_runs,
        _sizes(
            "lengths groups heads key value delta channels",
            ((1,), 1, 2, 4, 3, 0, 0),
            ((7, 1, 6), 3, 3, 16, 16, 1, 0),
            ((2, 130), 2, 4, 8, 24, 1, 0),
            ((2, 130), 1, 3, 16, 8, 0, 0),
            ((7, 1, 70), 2, 4, 8, 24, 1, 1),
        ),
        _sizes(
            "lengths groups heads key value delta channels",
            ((300, 5, 700), 16, 32, 128, 128, 1, 0),
            ((300, 5), 2, 48, 256, 64, 0, 0),
            ((300, 5), 4, 4, 96, 192, 1, 0),
            ((300, 5), 32, 32, 128, 128, 1, 1),
        ),
        exact=exact.linear_attention_runs,
        bounds={"*": (2e-5, 2e-5)},
    ),
    Operation(
        "selective_scan",
        make.scan_runs,
        _sizes("lengths channels size", ((1,), 5, 3), ((7, 1, 6), 64, 16), ((2, 130), 33, 8)),
        _sizes("lengths channels size", ((300, 5, 700), 5120, 16), ((300,), 777, 8)),
        exact=exact.scan_runs,
        bounds={"*": (2e-5, 2e-5)},
    ),
    Operation("copy_pages", make.copies, _sizes("page_size count", (1, 0), (3, 1), (16, 70)), equal=ALL),
)
"""`sample`, `filtered_scores` and `copy_pages` have no cases on a device: draws may differ there where scores tie
(`stages.parity_sampling`)."""
INDEXING = frozenset(("vocab_size", "logits_at", "set_logits", "replace_rows"))
"""Operations that index logits, which no backend has kernels for; `test_vocab_parallel` compares them."""
PYTORCH_ONLY = frozenset(("copy_pages", *INDEXING))
"""Operations that PyTorch computes on a device, too."""
