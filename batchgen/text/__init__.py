"""Tokens and text: tokenizer, chat template, detokenisation, stops."""
