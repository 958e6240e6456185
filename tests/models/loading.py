"""Models of folders that have not been checked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from batchgen.kernels.linear import Products
from batchgen.kernels.ranks import ALONE, Ranks
from batchgen.models.architectures import Requested
from batchgen.models.base import Form, Model, ModelSpec, Numbers
from batchgen.models.check import check_model
from batchgen.models.checkpoint.overrides import NO_OVERRIDES, Overrides
from batchgen.models.load import DeviceName, DtypeName, checked_spec, load_checked, of_rank
from batchgen.models.lora.config import NamePath


def load_model(
    path: str | os.PathLike[str],
    *,
    implementation: Requested = "auto",
    dtype: DtypeName = "auto",
    device: DeviceName = "auto",
    max_model_len: int | None = None,
    lora: Sequence[NamePath] = (),
    overrides: Overrides = NO_OVERRIDES,
    pickles: bool = False,
    form: Form = "full",
    products: Products = "measured",
    ranks: Ranks = ALONE,
) -> Model:
    """Check a model folder (or hub id) and load it.

    The arguments and errors are those of `check_model` and `checked_spec`.
    """
    checked = check_model(
        path,
        implementation=implementation,
        max_model_len=max_model_len,
        lora=lora,
        overrides=overrides,
        pickles=pickles,
    )
    checked = of_rank(checked, ranks)
    spec = checked_spec(checked, dtype=dtype, device=device, ranks=ranks)
    return load_checked(checked, replace(spec, numbers=Numbers(form, products)))


def inspect_model(
    path: str | os.PathLike[str],
    *,
    implementation: Requested = "auto",
    dtype: DtypeName = "auto",
    device: DeviceName = "auto",
    max_model_len: int | None = None,
    lora: Sequence[NamePath] = (),
    overrides: Overrides = NO_OVERRIDES,
) -> ModelSpec:
    """Spec of the model that `load_model` would load, without reading weights."""
    checked = check_model(
        path, implementation=implementation, max_model_len=max_model_len, lora=lora, overrides=overrides
    )
    return checked_spec(checked, dtype=dtype, device=device)
