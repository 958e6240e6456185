"""vllm-flash-attn's compiled library: where it is found, how it is loaded, and the one call that batchgen makes.

The library is a shared object that registers operations with torch. It is loaded without the Python code of the package
that ships it, so that an installed vLLM need not be imported. Versions differ in the arguments of their operations:
arguments are passed by name, in the order that the operation declares.

Sources, in order: an installed vLLM, a path given by the user, the stand-alone package.
"""

from __future__ import annotations

import lzma
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.types import AttentionArgs

_FILES = {2: "_vllm_fa2_C*.so*", 3: "_vllm_fa3_C*.so*"}
_PACKAGES = (("vllm", "vllm_flash_attn"), ("vllm_flash_attn", ""))
"""Packages that ship the library, and the folder in each that contains it."""


class FlashUnavailable(RuntimeError):
    """No flash attention is available; the message says why, source by source."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Adjacent runs of queries, each over separate pages. Causal: a run's last query is at its last key's position."""

    query_starts: Tensor
    """[B + 1] int32: first query of each run, from 0; the last entry is the number of queries."""
    key_lens: Tensor
    """[B] int32: number of keys of each run."""
    pages: Tensor
    """[B, n] int32, padded with any page."""
    max_queries: int
    """Most queries of a run."""
    max_keys: int
    """max(key_lens)."""


@dataclass(frozen=True, slots=True)
class FlashLibrary:
    """A loaded library. `version` 3 supports Hopper only, 2 everything from Ampere on."""

    version: int
    source: str
    """Origin, such as "vLLM 0.21.0" or a path."""
    _forward: _Operation
    _schedule: _Operation | None

    def __str__(self) -> str:
        return f"flash-attn {self.version} of {self.source}"

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        runs: Runs,
        args: AttentionArgs,
        schedule: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of every run's queries over the run's pages.

        Args:
            query: [t, N, D], float16 or bfloat16.
            keys: [P, S, K, D] of the query's dtype.
            values: [P, S, K, Dv].
            runs: which queries see which pages.
            args: settings; sinks are left out.
            schedule: result of `schedule` for the same runs and settings.
            out: [t, N, Dv] to write to.

        Returns:
            [t, N, Dv] in the query's dtype, and the natural log-sum-exp [N, t] float32.
        """
        result = self._forward(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=runs.query_starts,
            cu_seqlens_k=runs.query_starts if self.version == 2 else None,  # version 2 requires one, but ignores it
            seqused_k=runs.key_lens,
            max_seqlen_q=runs.max_queries,
            max_seqlen_k=runs.max_keys,
            page_table=runs.pages,
            block_table=runs.pages,
            softmax_scale=args.scale,
            window_size_left=_window_left(args),
            softcap=args.softcap or 0.0,
            scheduler_metadata=schedule,
        )
        return result[0], result[1]

    def schedule(
        self, query_heads: int, keys: Tensor, values: Tensor, runs: Runs, args: AttentionArgs
    ) -> Tensor | None:
        """Assignment of the runs to multiprocessors, computed once for all layers of a step; None in version 2."""
        if self._schedule is None:
            return None
        result: Tensor = self._schedule(
            batch_size=len(runs.key_lens),
            max_seqlen_q=runs.max_queries,
            max_seqlen_k=runs.max_keys,
            num_heads=query_heads,
            num_heads_k=keys.shape[2],
            headdim=keys.shape[3],
            headdim_v=values.shape[3],
            qkv_dtype=keys.dtype,
            seqused_k=runs.key_lens,
            cu_seqlens_q=runs.query_starts,
            page_size=keys.shape[1],
            window_size_left=_window_left(args),
            has_softcap=bool(args.softcap),
        )
        return result


def _window_left(args: AttentionArgs) -> int:
    """Keys that a query sees before its own position; -1: all."""
    return -1 if args.window is None else args.window - 1


_FORWARD: Mapping[str, Any] = {
    "p_dropout": 0.0,
    "zero_tensors": False,
    "is_causal": True,
    "window_size_right": -1,  # causal sets it to 0
    "return_softmax": False,
    "num_splits": 0,
    "is_rotary_interleaved": True,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
"""Constant arguments of every forward call, for versions that declare them."""
_SCHEDULE: Mapping[str, Any] = {
    "max_seqlen_k_new": 0,
    "is_causal": True,
    "window_size_right": -1,
    "num_splits": 0,
    "sm_margin": 0,
}
_GIVEN = {
    "forward": (
        "q k v out cu_seqlens_q cu_seqlens_k seqused_k max_seqlen_q max_seqlen_k page_table block_table softmax_scale "
        "window_size_left softcap scheduler_metadata"
    ),
    "schedule": (
        "batch_size max_seqlen_q max_seqlen_k num_heads num_heads_k headdim headdim_v qkv_dtype seqused_k cu_seqlens_q "
        "page_size window_size_left has_softcap"
    ),
}
"""Arguments that each call passes."""


class _Operation:
    """A registered operation, called by argument names; optional arguments that are not given are None."""

    def __init__(self, overload: Any, passed: str, constants: Mapping[str, Any]) -> None:
        arguments = overload._schema.arguments
        known = {*passed.split(), *constants}
        strange = [a.name for a in arguments if a.name not in known and a.type.kind() != "OptionalType"]
        if strange:
            raise FlashUnavailable(f"its operation {overload} needs {', '.join(strange)}, which batchgen does not know")
        self._overload = overload
        self._names = [a.name for a in arguments]
        self._constants = constants

    def __call__(self, **passed: Any) -> Any:
        values = {**self._constants, **passed}
        return self._overload(*[values.get(name) for name in self._names])


def versions_for(capability: tuple[int, int]) -> tuple[int, ...]:
    """Versions that run on a chip, best first.

    Raises:
        FlashUnavailable: no version does.
    """
    if capability < (8, 0):
        major, minor = capability
        raise FlashUnavailable(f"it needs a GPU of compute capability 8.0 or more, and this one has {major}.{minor}")
    return (3, 2) if capability[0] == 9 else (2,)


def find_flash(
    versions: tuple[int, ...], path: str | None, accept: Callable[[FlashLibrary], FlashLibrary]
) -> FlashLibrary:
    """The first library that loads and is accepted.

    Args:
        versions: the versions to use, best first.
        path: a library, a folder that contains some, or a library compressed as .xz or .zst; None: not given.
        accept: checks a loaded library and returns it, perhaps with fewer features; raises `FlashUnavailable`.

    Raises:
        FlashUnavailable: there is none; the message says what is wrong with each.
    """
    reasons: list[str] = []
    for source, place in _sources(path, reasons):
        for version, file in _files(source, place, versions, reasons):
            shown = source if file == place else f"{source}: {file.name}"
            try:
                library = _load(version, source, file)
            except (FlashUnavailable, OSError, RuntimeError) as problem:
                reasons.append(f"{shown} cannot be loaded: {first_line(problem)}")
                continue
            try:
                return accept(library)
            except FlashUnavailable as problem:
                reasons.append(f"{shown}: {problem}")
    raise FlashUnavailable("; ".join(reasons))


def _sources(path: str | None, reasons: list[str]) -> Iterator[tuple[str, Path]]:
    """Places to search, as (name, folder or file); appends missing packages to `reasons`."""
    for number, (package, inside) in enumerate(_PACKAGES):
        if number == 1 and path is not None:
            yield path, Path(path)
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            reasons.append(f"{'vLLM' if package == 'vllm' else 'the package ' + package} is not installed")
        else:
            yield _named(package), Path(next(iter(spec.submodule_search_locations))) / inside


def _named(package: str) -> str:
    shown = "vLLM" if package == "vllm" else package
    try:
        return f"{shown} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return shown


def _files(source: str, place: Path, versions: tuple[int, ...], reasons: list[str]) -> Iterator[tuple[int, Path]]:
    """Libraries at a place, as (version, file), best version first."""
    if not place.exists():
        reasons.append(f"{source}: there is no such file or folder")
        return
    found = False
    for version in versions:
        matching = [place] if place.match(_FILES[version]) else sorted(place.glob(_FILES[version]))
        for file in matching:
            found = True
            yield version, file
    if not found:
        wanted = " nor ".join(_FILES[v].rstrip("*") for v in versions)
        reasons.append(f"{source}: {'contains no' if place.is_dir() else 'is not named'} {wanted}")


_registered_by: dict[int, Path] = {}
"""Version -> the file that registered its operations in this process."""


def _load(version: int, source: str, file: Path) -> FlashLibrary:
    """Load a library. Operations can be registered once per process: a second file with the same ones is rejected."""
    space = getattr(torch.ops, f"_vllm_fa{version}_C")
    name = "fwd" if version == 3 else "varlen_fwd"
    if not hasattr(space, name):
        if file.suffix in _UNPACK:
            _load_packed(file)
        else:
            _load_shared_object(file)
        _registered_by[version] = file
    elif _registered_by.get(version, file) != file:
        raise FlashUnavailable(f"{_registered_by[version]} is loaded already and registers the same operations")
    if not hasattr(space, name):
        raise FlashUnavailable(f"it registers no operation _vllm_fa{version}_C::{name}")
    forward = _Operation(getattr(space, name).default, _GIVEN["forward"], _FORWARD)
    schedule = None
    if version == 3 and hasattr(space, "get_scheduler_metadata"):
        schedule = _Operation(space.get_scheduler_metadata.default, _GIVEN["schedule"], _SCHEDULE)
    return FlashLibrary(version, source, forward, schedule)


def _load_shared_object(file: Path) -> None:
    torch.ops.load_library(str(file))  # type: ignore[no-untyped-call]


def _load_packed(file: Path) -> None:
    """Unpack and load. The unpacked file is deleted at once: a loaded library stays mapped."""
    with tempfile.TemporaryDirectory(prefix="batchgen-") as folder:
        target = Path(folder) / file.stem
        with target.open("wb") as unpacked:
            _UNPACK[file.suffix](file, unpacked)
        _load_shared_object(target)


def _unpack_xz(file: Path, target: Any) -> None:
    try:
        with lzma.open(file) as packed:
            shutil.copyfileobj(packed, target, 1 << 20)
    except (lzma.LZMAError, EOFError) as problem:
        raise FlashUnavailable(f"it cannot be unpacked: {problem}") from None


def _unpack_zst(file: Path, target: Any) -> None:
    import zstandard  # imported here: the GPU check runs with little but torch installed

    try:
        with file.open("rb") as packed:
            zstandard.ZstdDecompressor().copy_stream(packed, target)
    except zstandard.ZstdError as problem:
        raise FlashUnavailable(f"it cannot be unpacked: {problem}") from None


_UNPACK: Mapping[str, Callable[[Path, Any], None]] = {".xz": _unpack_xz, ".zst": _unpack_zst}


def first_line(problem: BaseException) -> str:
    """First line of an error; for torch's "could not load", that of its cause."""
    source = problem.__cause__ or problem
    return (str(source).strip() or type(source).__name__).splitlines()[0][:300]
