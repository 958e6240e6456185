"""Export of the training network to a bfloat16 model folder in Hugging Face's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from configs.demo_model.network import Network, Shape
from configs.demo_model.tokenizer import BOS, CONTEXT, END, EOS, PAD, SPECIALS

BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def llama_config(shape: Shape, tokenizer: Any) -> Any:
    """`LlamaConfig` of a shape, with the tokenizer's special ids."""
    bos, end, eos, pad = tokenizer.convert_tokens_to_ids([BOS, END, EOS, PAD])
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.context,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=[end, eos],
        pad_token_id=pad,
        dtype=torch.bfloat16,
    )


def llama_weights(network: Network) -> dict[str, Tensor]:
    """Parameters of the network in bfloat16, by their names in a Llama checkpoint."""
    weights = {"model.embed_tokens.weight": network.embedding, "model.norm.weight": network.norm}
    for index, block in enumerate(network.blocks):
        for ours, theirs in BLOCK_NAMES.items():
            weights[f"model.layers.{index}.{theirs}.weight"] = block.get_parameter(ours)
    return {name: weight.detach().bfloat16() for name, weight in weights.items()}


def text_settings(folder: Path) -> dict[str, Any]:
    """The configuration of the language model in a folder, with or without a vision tower."""
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = found.get("text_config", found)
    return text


def language_weights(folder: Path) -> dict[str, Tensor]:
    """Tensors of the language model in a folder, with or without a vision tower, by their names in a `LlamaModel`."""
    stored = load_file(folder / "model.safetensors")
    found = {name.removeprefix("language_model.").removeprefix("model."): value for name, value in stored.items()}
    return {name: value for name, value in found.items() if name.startswith(("embed_tokens.", "layers.", "norm."))}


def language_model(folder: Path) -> Any:
    """The language model in a folder, with or without a vision tower, as a float32 `LlamaForCausalLM`."""
    model = LlamaForCausalLM(LlamaConfig(**text_settings(folder))).float().eval()
    model.model.load_state_dict(language_weights(folder))
    model.tie_weights()
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def load_weights(network: Network, folder: Path) -> None:
    """Load the language model in a folder, with or without a vision tower, into the network."""
    stored = language_weights(folder)
    with torch.no_grad():
        network.embedding.copy_(stored["embed_tokens.weight"])
        network.norm.copy_(stored["norm.weight"])
        for index, block in enumerate(network.blocks):
            for ours, theirs in BLOCK_NAMES.items():
                block.get_parameter(ours).copy_(stored[f"layers.{index}.{theirs}.weight"])


def llama_model(network: Network, tokenizer: Any) -> Any:
    """A bfloat16 `LlamaForCausalLM` with the network's weights."""
    config = llama_config(network.shape, tokenizer)
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    weights = llama_weights(network)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"]), missing
    assert not unexpected, unexpected
    model.tie_weights()
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    return model


def save(network: Network, tokenizer: Any, folder: Path) -> None:
    """Write the model and the tokenizer into `folder`."""
    llama_model(network, tokenizer).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
    save_tokenizer(tokenizer, folder)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write `tokenizer.json` and a `tokenizer_config.json` that older versions of transformers can read too."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    named = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "additional_special_tokens": [token for token in SPECIALS if token not in named],
        "chat_template": tokenizer.chat_template,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
