#!/usr/bin/env bash
# Ray Data: the default batch format of map_batches turns an integer column with nulls into floats.
#
# Versions: ray 2.60.0, pyarrow 26.0.1, pandas 3.1.1, numpy 2.3.5, Python 3.11.
#
# Input: a table with two columns of int64, one of which has a null. A function that returns each batch as it is.
#
# Documented: `batch_format="default"` gives a dictionary of NumPy arrays, and the other formats are pandas and pyarrow.
# Behaviour: NumPy has no integers with nulls, so the column with a null arrives as float64 with NaN in its place. All
# integers above 2^53 lose their last digits, and a function that changes nothing gives back a column of another type,
# with NaN instead of null. No warning says so. Only batches with a null are changed, so that it may depend on the batch
# size whether a row is. With batch_format="pyarrow" nothing is lost, nor with "pandas" in this version.
#
# Output seen:
#   default: with_null=[1.152921504606847e+18, nan] double, without=[1152921504606846977, 3] int64
#   pandas:  with_null=[1152921504606846977, None] int64, without=[1152921504606846977, 3] int64
#   pyarrow: with_null=[1152921504606846977, None] int64, without=[1152921504606846977, 3] int64
#
# Exits with 0 while this is so, and with 1 once the default format keeps the integers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'ray[data]==2.60.0' pyarrow==26.0.1 pandas==3.1.1 numpy==2.3.5
RAY_USAGE_STATS_ENABLED=0 "$folder/venv/bin/python" - 2>/dev/null <<'PY'
import pyarrow as pa
import ray

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
large = 2**60 + 1
table = pa.table({"with_null": pa.array([large, None], pa.int64()), "without": pa.array([large, 3], pa.int64())})
seen = {}
for name in ("default", "pandas", "pyarrow"):
    same = ray.data.from_arrow(table).map_batches(lambda batch: batch, batch_format=name)
    found = pa.concat_tables(ray.get(same.to_arrow_refs()))
    seen[name] = [(column, found[column].to_pylist(), str(found[column].type)) for column in found.column_names]
    print(f"{name + ':':9}" + ", ".join(f"{column}={values} {kind}" for column, values, kind in seen[name]))
kept = [("with_null", [large, None], "int64"), ("without", [large, 3], "int64")]
lost = seen["default"][0]
is_so = lost[1][0] == float(large) and lost[2] == "double" and seen["default"][1] == kept[1]
raise SystemExit(not (is_so and seen["pandas"] == kept and seen["pyarrow"] == kept))
PY
