"""How models write calls of tools: formats, parsing of outputs, and grammars of calls that a row requires."""
