"""Images: size from the header, pixels as an upright RGB image, as transformers' `load_image` gives them.

Only formats of a short list are opened, by what the bytes are and not by what they are called; a plug-in that starts
another program (EPS) or reads other files is never reached. Pillow is an extra and imported where it is used.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from batchgen.errors import UsageError
from batchgen.media.faults import MediaFault, describe, what_else
from batchgen.media.parts import check_parts, png_chunks

if TYPE_CHECKING:
    from PIL import Image

_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP")
_NAMES: Final = "JPEG, PNG, WebP, GIF, TIFF or BMP"
_SIGNS: Final = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF8", "GIF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"BM", "BMP"),
)
"""First bytes of the formats; WebP is a RIFF file."""
_SCAN: Final = b"\xff\xda"
MAX_SCANS: Final = 100
"""Most scans of a JPEG image, each of which may go over all pixels; encoders write up to about twenty."""
_ORIENTATION: Final = 0x0112
"""Number of the tag in EXIF."""
_SWAPPED: Final = frozenset({5, 6, 7, 8})
"""Orientations that swap width and height."""

Pixels = npt.NDArray[np.uint8]


def image_format(data: bytes) -> str | None:
    """The format of an encoded image by its first bytes; None if it is none that is read."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((name for sign, name in _SIGNS if data.startswith(sign)), None)


def image_size(data: bytes, max_pixels: int) -> tuple[int, int]:
    """(width, height) of the upright image, from the header of an encoded one.

    Raises:
        MediaFault: it is not an image, is damaged, or has more than `max_pixels`.
    """
    with _opened(data) as image:
        width, height = image.size
        if image.format != "TIFF" and _orientation(image, data) in _SWAPPED:
            width, height = height, width
    check_pixels(width, height, max_pixels)
    return width, height


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Refuse an image by its size.

    Raises:
        MediaFault: it has no pixels, or more than `max_pixels`.
    """
    if width < 1 or height < 1:
        raise MediaFault(f"has no pixels ({width} x {height}); leave it out")
    if width * height > max_pixels:
        remedy = "make it smaller, or raise --max-image-pixels"
        raise MediaFault(f"has {width} x {height} pixels; at most {max_pixels:,} are allowed: {remedy}")


def decode_image(data: bytes) -> Image.Image:
    """The upright image of an encoded one, in RGB; alpha is dropped, 16-bit grey keeps its high byte.

    Raises:
        MediaFault: the image is damaged.
    """
    with _opened(data) as image:
        try:
            turn = 1 if image.format == "TIFF" else _orientation(image, data)  # the library turns TIFF itself
            image.load()
            return _turned(_rgb(image), turn)
        except Exception as error:
            raise MediaFault(f"is a damaged {image.format} image ({describe(error)}); replace the file") from None


def upright_pixels(image: Image.Image) -> Pixels:
    """[H, W, 3] pixels of an image of the library, as `decode_image` gives them for an encoded one.

    Raises:
        MediaFault: its pixels cannot be read.
    """
    _silence()
    if image.format == "EPS":  # reading its pixels starts another program
        raise MediaFault(f"is a PostScript file, not {_NAMES}; convert it")
    try:
        turn = image.getexif().get(_ORIENTATION, 1)
        return np.asarray(_turned(_rgb(image), turn))
    except Exception as error:
        raise MediaFault(f"cannot be read ({describe(error)}); give it as an RGB image") from None


def array_pixels(array: npt.NDArray[Any]) -> Pixels:
    """[H, W, 3] pixels of [H, W], [H, W, C] or [C, H, W] values, bytes or floating point in [0, 1]; alpha is dropped.

    Raises:
        MediaFault: it has another shape, another type, or values out of range.
    """
    shape = list(array.shape)
    if array.ndim == 3 and shape[2] not in (1, 3, 4) and shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4):
        raise MediaFault(
            f"is an array of shape {shape}; an image has [H, W], [H, W, C] or [C, H, W], and C of 1, 3 or 4"
        )
    if array.dtype.kind == "f":
        if not ((array >= 0) & (array <= 1)).all():
            raise MediaFault("has values outside 0 to 1; scale them, or give bytes (uint8)")
        array = np.rint(array.astype(np.float32) * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise MediaFault(f"is an array of {array.dtype}; give bytes (uint8), or floating point from 0 to 1")
    return np.ascontiguousarray(np.broadcast_to(array[:, :, :3], (*array.shape[:2], 3)))


def image_of(pixels: bytes, size: tuple[int, ...]) -> Image.Image:
    """The image of [H, W, 3] bytes."""
    return _library().frombytes("RGB", (size[0], size[1]), pixels)


def _library() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise UsageError("images need the library Pillow; pip install 'batchgen[media]'") from None
    return Image


def _silence() -> None:
    """Keep the library's warnings about damaged files from the user: errors say what is wrong.

    A filter for its modules alone, which stays: `catch_warnings` must not be used by several threads.
    """
    _library()
    if not warnings.filters or warnings.filters[0][0] != "ignore" or "PIL" not in str(warnings.filters[0][3]):
        warnings.filterwarnings("ignore", module=r"PIL\.")


def _opened(data: bytes) -> Image.Image:
    form = image_format(data)
    if form is None:
        raise MediaFault(f"is {what_else(data)}, not {_NAMES}; convert it")
    if form == "JPEG" and (scans := data.count(_SCAN)) > MAX_SCANS:
        raise MediaFault(f"is a JPEG image of {scans} scans; at most {MAX_SCANS} are allowed: convert it")
    check_parts(data, form)
    _silence()
    try:
        image: Image.Image = _library().open(io.BytesIO(data), formats=_FORMATS)
    except Exception as error:
        if "decompression bomb" in str(error):
            raise MediaFault("has more pixels than the library opens; make it smaller") from None
        raise MediaFault(f"is a damaged {form} image ({describe(error)}); replace the file") from None
    return image


def _orientation(image: Image.Image, data: bytes) -> int:
    """The orientation in the image's EXIF or XMP, 1 if it has none that can be read."""
    from PIL import Image as library

    if image.format == "PNG" and "exif" not in image.info and (late := _exif_chunk(data)):
        image.info["exif"] = late
    try:
        # The method of the base class: that of PNG images decodes the pixels first.
        return int(library.Image.getexif(image).get(_ORIENTATION, 1))
    except Exception:  # a note that cannot be read says nothing
        return 1


def _exif_chunk(data: bytes) -> bytes | None:
    """The EXIF chunk of a PNG file, which may come after the pixels."""
    at = next((at for at in png_chunks(data) if data[at + 4 : at + 8] == b"eXIf"), None)
    return None if at is None else b"Exif\0\0" + data[at + 8 : at + 8 + int.from_bytes(data[at : at + 4], "big")]


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # the library's conversion makes all above 255 white
        image = _library().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _turned(image: Image.Image, orientation: int) -> Image.Image:
    turns = _library().Transpose
    method = {
        2: turns.FLIP_LEFT_RIGHT,
        3: turns.ROTATE_180,
        4: turns.FLIP_TOP_BOTTOM,
        5: turns.TRANSPOSE,
        6: turns.ROTATE_270,
        7: turns.TRANSVERSE,
        8: turns.ROTATE_90,
    }.get(orientation)
    return image if method is None else image.transpose(method)
