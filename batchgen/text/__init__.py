"""Tokenizer, chat templates, detokenization, stop conditions and grammars."""
