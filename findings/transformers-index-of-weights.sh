#!/usr/bin/env bash
# transformers does not read a tensor from the file that the index of a checkpoint names.
#
# Versions: transformers 5.24.0, safetensors 0.8.0, torch 2.13.0, Python 3.11.
#
# Input: a valid checkpoint in two safetensors files. The second file has a newer copy of one tensor, as when a part of a
# model is trained further and saved next to it, and `weight_map` of model.safetensors.index.json names that file for it.
# The same checkpoint is made twice: the newer file is called 0-newer.safetensors, and z-newer.safetensors.
#
# Documented: `weight_map` says which file holds each tensor.
# Behaviour: the loader collects the names of the files from the index, then takes every tensor of every file in the order
# of the files' names; the last copy wins. So the same index gives the old or the new tensor, by how the file is called,
# and nothing is printed.
#
# Output seen (the tensor is 1 in the old copy and 5 in the new one):
#   0-newer.safetensors: the index names it, loaded 1.0
#   z-newer.safetensors: the index names it, loaded 5.0
#
# Exits with 0 while this is so, and with 1 once both are loaded from the file that the index names.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 safetensors==0.8.0 torch==2.13.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import json
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
NAME, OLD = "model.norm.weight", "model-00001-of-00001.safetensors"
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=False, **sizes))
found = {}
for newer in ("0-newer.safetensors", "z-newer.safetensors"):
    folder = Path(newer).with_suffix("")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / OLD)
    save_file({NAME: tensors[NAME] * 5}, folder / newer, metadata={"format": "pt"})
    places = dict.fromkeys(tensors, OLD) | {NAME: newer}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = LlamaForCausalLM.from_pretrained(folder)
    found[newer] = float(loaded.model.norm.weight[0].detach())
    print(f"{newer}: the index names it, loaded {found[newer]}")
sys.exit(found != {"0-newer.safetensors": 1.0, "z-newer.safetensors": 5.0})
PYTHON
