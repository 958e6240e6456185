#!/usr/bin/env bash
# transformers' Mamba models forget the first part of a text that is fed in two parts.
#
# Versions: transformers 5.24.0, torch 2.13.0, Python 3.11.
#
# Input: a Mamba and a Mamba-2 model with random weights, and 12 token ids. They are computed at once; in two parts of 6
# with the cache that the first part returned; and one after another with the cache.
#
# Documented: the cache holds the convolution and recurrent states, so a forward may go on from it.
# Behaviour: the scan of Mamba-1 has no argument for a state to begin with. A second part of more than one token uses the
# cached convolution inputs, but begins with a recurrent state of zeros, and nothing is printed. Its logits are those of
# neither text. Single tokens take another function, which uses the state, so generation after one prompt is right.
# Mamba-2 goes on from its state in both ways.
#
# Output seen (largest difference of the last token's logits from those of the whole text; logits have a standard
# deviation of about 1):
#   mamba: two parts far from the whole, single tokens equal
#   mamba2: two parts equal, single tokens equal
#
# Exits with 0 while this is so, and with 1 once both models go on from the cache in both ways.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 torch==2.13.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "tie_word_embeddings": False}
models = {
    "mamba": MambaForCausalLM(MambaConfig(**sizes)),
    "mamba2": Mamba2ForCausalLM(Mamba2Config(**sizes, num_heads=4, head_dim=32, n_groups=1, chunk_size=8)),
}
ids = torch.randint(0, 64, (1, 12))


def last(model, sizes):
    cache, at = None, 0
    for size in sizes:
        out = model(ids[:, at : at + size], cache=cache, use_cache=True)
        cache, at = out.cache, at + size
    return out.logits[0, -1]


found = {}
with torch.no_grad():
    for name, model in models.items():
        for parameter in model.parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        whole = model.eval()(ids).logits[0, -1]
        ways = {"two parts": (6, 6), "single tokens": (1,) * 12}
        apart = {way: float((last(model, parts) - whole).abs().max() / whole.std()) for way, parts in ways.items()}
        found[name] = tuple("equal" if value < 1e-2 else "far from the whole" for value in apart.values())
        print(f"{name}: two parts {found[name][0]}, single tokens {found[name][1]}")
sys.exit(found != {"mamba": ("far from the whole", "equal"), "mamba2": ("equal", "equal")})
PYTHON
