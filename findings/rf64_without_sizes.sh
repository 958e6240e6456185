#!/bin/sh
# A WAV file whose writer could not seek back (a pipe) has a placeholder in place of the size of its samples. libsndfile
# reads such a RIFF file to its end. The same samples in the form RF64, whose sizes are in the chunk `ds64`, are read as
# an empty sound, without an error, where these sizes are 0, and are refused where they are 2^64-1. A size that is too
# large but less than 2^63 is cut to what is there.
#
# Versions: soundfile 0.13.1 (libsndfile 1.2.2), numpy 2.2.6
# Behaviour seen: frames of 4,800 samples
#   RIFF, data size 0xFFFFFFFF       4800
#   RF64, sizes as written           4800
#   RF64, sizes 0                    0
#   RF64, sizes 2^63-1               4800
#   RF64, sizes 2^64-1               LibsndfileError
# Exits with 0 while that is so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q soundfile==0.13.1 numpy==2.2.6
"$folder/venv/bin/python" - <<'PYTHON'
import io
import struct

import numpy as np
import soundfile

SAMPLES = (np.arange(4800) % 100 / 200).astype(np.float32)


def written(form: str) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, SAMPLES, 16000, format=form, subtype="PCM_16")
    return out.getvalue()


def frames(data: bytes) -> str:
    try:
        return str(soundfile.SoundFile(io.BytesIO(data)).frames)
    except soundfile.LibsndfileError:
        return "LibsndfileError"


def rf64(size: int) -> bytes:
    data = written("RF64")
    at = data.index(b"ds64") + 8  # sizes of the file, of the samples, and their number
    return data[:at] + struct.pack("<3Q", size, size, size) + data[at + 24 :]


riff = written("WAV")
at = riff.index(b"data") + 4
found = {
    "RIFF, data size 0xFFFFFFFF": frames(riff[:at] + b"\xff\xff\xff\xff" + riff[at + 4 :]),
    "RF64, sizes as written": frames(written("RF64")),
    "RF64, sizes 0": frames(rf64(0)),
    "RF64, sizes 2^63-1": frames(rf64(2**63 - 1)),
    "RF64, sizes 2^64-1": frames(rf64(2**64 - 1)),
}
for name, value in found.items():
    print(f"{name:32} {value}")
assert list(found.values()) == ["4800", "4800", "0", "4800", "LibsndfileError"]
PYTHON
