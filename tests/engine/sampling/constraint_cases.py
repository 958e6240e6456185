"""Schemas, patterns and grammars for tests: valid, unenforceable and invalid ones."""

from __future__ import annotations

from typing import Any


def obj(required: str = "", /, **properties: Any) -> dict[str, Any]:
    """An object schema; `required`: names of required properties, separated by spaces."""
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return schema | ({"required": required.split()} if required else {})


def text(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def items(schema: Any, **keywords: Any) -> dict[str, Any]:
    return {"type": "array", "items": schema, **keywords}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "boolean"}
    for level in range(levels):
        schema = items(schema, minItems=1, maxItems=1) if level % 2 else obj("a", a=schema)
    return schema


WHOLE = {"type": "integer", "minimum": 0, "maximum": 99}
SHORT = text(maxLength=6)
FLAG = {"type": "boolean"}
NODE = {
    "$defs": {"n": obj("v", v=WHOLE, next={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})},
    "$ref": "#/$defs/n",
}
TREE = {
    "$defs": {"t": obj("k", k={"enum": ["leaf", "node"]}, kids=items({"$ref": "#/$defs/t"}, maxItems=2))},
    "$ref": "#/$defs/t",
}
EXPRESSION = {
    "$defs": {
        "e": {
            "anyOf": [WHOLE, obj("op l r", op={"enum": ["+", "*"]}, l={"$ref": "#/$defs/e"}, r={"$ref": "#/$defs/e"})]
        }
    },
    "$ref": "#/$defs/e",
}

SCHEMAS: list[Any] = [
    # types
    *({"type": kind} for kind in ("null", "boolean", "integer")),
    {"type": ["integer", "null"]},
    {"type": ["boolean", "null", "integer"]},
    {"type": ["number", "integer"], "minimum": 0, "maximum": 9},
    {"type": "integer", "minLength": 3, "description": "a keyword of another type says nothing"},
    # numbers
    *({"type": "integer", **bounds} for bounds in (
        {"minimum": 5, "maximum": 17}, {"minimum": -3, "maximum": 3}, {"exclusiveMinimum": -5, "exclusiveMaximum": 3},
        {"minimum": 0, "maximum": 0}, {"minimum": 99, "maximum": 101}, {"minimum": 0.5, "maximum": 3.5},
        {"minimum": -(10**12), "maximum": 10**12}, {"maximum": -1, "minimum": -9}, {"exclusiveMinimum": 9.5,
        "maximum": 12},
    )),
    *({"type": "number", **bounds} for bounds in (
        {"minimum": 0, "maximum": 1}, {"minimum": -1.5, "maximum": 2.25}, {"exclusiveMinimum": 0,
        "exclusiveMaximum": 1},
        {"minimum": 1e6, "maximum": 1e7}, {"minimum": 0.000001, "maximum": 0.00001}, {"minimum": -0.5,
        "exclusiveMaximum": 0},
    )),
    # strings
    *(text(**more) for more in (
        {"maxLength": 0}, {"maxLength": 5}, {"minLength": 3, "maxLength": 3}, {"minLength": 1, "maxLength": 40},
        {"pattern": "^a+b?$", "title": "T"}, {"pattern": "^[a-z]{2,6}$"}, {"pattern": r"^\d{3}-\d{4}$"},
        {"pattern": "foo|bar"}, {"pattern": r"^\S{1,5}$"}, {"pattern": r"^[^0-9]{4}$"}, {"pattern": r"^\W\w\D\d$"},
        {"pattern": "^(a|b(c|d)){1,3}$"}, {"pattern": "^.{2}$"}, {"pattern": "^[日本é]{1,4}$"}, {"pattern": "^$"},
        {"pattern": r"^[\w.+-]{1,8}@[a-z]{1,5}\.(com|org)$"}, {"pattern": r"^\u0041[\x42-\x44]$"},
        {"pattern": "^😀?é{2}$"},
        {"format": "date"}, {"format": "time"}, {"format": "date-time"}, {"format": "ipv4"}, {"format": "uuid"},
        {"format": "duration"}, {"format": "date", "minLength": 1}, {"format": "password", "maxLength": 4},
    )),
    # const and enum
    {"const": None}, {"const": True}, {"const": 0}, {"const": -1.5}, {"const": "a\"b\\c\n/é日😀"}, {"const": []},
    {"const": {"b": [1, {"c": None}], "a": "x"}}, {"const": 1e-7}, {"const": 2**63 - 1},
    {"enum": ["red", "green", "blue"]}, {"enum": [1, "1", 1.5, None, True, [], {}]}, {"enum": ["", " ", "  "]},
    {"enum": ["日本", "żółć", "ñ"]}, {"type": "string", "enum": ["a", 1, None]}, {"enum": [1, 2, 3], "minimum": 2},
    {"type": "integer", "enum": [1, 2.0, 2.5]}, {"enum": [f"value number {i}" for i in range(1500)]},
    {"const": "x", "type": "string", "maxLength": 3},
    # arrays
    items(WHOLE, maxItems=3), items(WHOLE, minItems=2, maxItems=4), items(FLAG, minItems=3, maxItems=3),
    items(False), {"type": "array", "maxItems": 0}, items(items(FLAG, maxItems=2), minItems=1, maxItems=2),
    {"type": "array", "prefixItems": [WHOLE, SHORT]}, {"type": "array", "prefixItems": [WHOLE], "items": False,
    "minItems": 1},
    {"type": "array", "prefixItems": [WHOLE, {"const": "x"}], "items": FLAG, "minItems": 2, "maxItems": 4},
    {"prefixItems": [FLAG, True], "maxItems": 1}, items({"enum": [1, 2]}, uniqueItems=False, maxItems=5),
    {"type": "array", "prefixItems": [FLAG], "unevaluatedItems": False}, {"items": {"type": "null"}, "maxItems": 2},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [WHOLE, FLAG],
    "additionalItems": False},
    {"type": "array", "prefixItems": [FLAG, False, FLAG]}, items({"type": "null"}, minItems=2.0, maxItems=3.0),
    # objects
    obj(), obj(a=WHOLE), obj("a", a=WHOLE), obj("b a", a=WHOLE, b=FLAG), obj("b", a=WHOLE, b=FLAG, c={"type": "null"}),
    obj("a", **{"a": WHOLE, "é ñ": FLAG, "with \"quotes\"": FLAG, "sl/ash": {"type": "null"}}),
    obj("a b", a=WHOLE) | {"additionalProperties": {"type": "boolean"}},
    obj("a", a=WHOLE) | {"additionalProperties": False}, obj("a", a=obj("b", b=obj("c", c=FLAG))),
    obj(a=FLAG, b=FLAG, c=FLAG) | {"minProperties": 2}, obj(a=FLAG, b=FLAG, c=FLAG) | {"maxProperties": 1},
    obj("a", a=FLAG, b=FLAG, c=FLAG, d=FLAG) | {"minProperties": 2, "maxProperties": 3},
    {"type": "object", "maxProperties": 0}, {"properties": {"a": WHOLE}, "required": ["a"]},
    {"type": "object", "patternProperties": {"^k[0-9]$": WHOLE}, "additionalProperties": False, "maxProperties": 3},
    {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": WHOLE, "maxProperties": 3},
    {"type": "object", "propertyNames": {"pattern": "^[ab]{1,2}$"}, "additionalProperties": FLAG, "maxProperties": 2},
    {"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": FLAG, "maxProperties": 2},
    {"type": "object", "additionalProperties": WHOLE, "maxProperties": 2, "minProperties": 1},
    obj("a", a=WHOLE) | {"patternProperties": {"^x": FLAG}}, obj("a", a=WHOLE) | {"unevaluatedProperties": False},
    obj("a", a=WHOLE) | {"propertyNames": {"pattern": "^[a-z]$"}}, obj("ab", ab={"type": "null"}),
    obj(**{f"p{i}": FLAG for i in range(40)}), obj("a", a=FLAG, b=False),
    # references
    NODE, TREE, EXPRESSION,
    {"$defs": {"a/b": WHOLE, "c~d": FLAG, "e f": {"type": "null"}}, **obj(
        "x y z", x={"$ref": "#/$defs/a~1b"}, y={"$ref": "#/$defs/c~0d"}, z={"$ref": "#/$defs/e%20f"})},
    {"definitions": {"w": WHOLE}, "$ref": "#/definitions/w"}, obj("a b", a=WHOLE, b={"$ref": "#/properties/a"}),
    {"anyOf": [WHOLE, items({"$ref": "#"}, maxItems=1)]}, {"prefixItems": [FLAG], "items": {"$ref": "#/prefixItems/0"},
    "maxItems": 2},
    {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(30)} | {"d30": FLAG}, "$ref": "#/$defs/d0"},
    {"$ref": "#/$defs/n", "$defs": {"n": FLAG}, "title": "a note", "description": "may be next to it",
    "default": True},
    # combinations
    {"anyOf": [WHOLE, FLAG]}, {"anyOf": [obj("a", a=WHOLE), obj("b", b=FLAG)]}, {"anyOf": [{"const": 1}, False]},
    {"oneOf": [{"type": "integer"}, {"type": "null"}]}, {"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}]},
    {"oneOf": [{"type": "integer", "maximum": 3, "minimum": 0}, {"type": "integer", "minimum": 4, "maximum": 9}]},
    {"oneOf": [obj("kind r", kind={"const": "circle"}, r=WHOLE), obj("kind s", kind={"const": "square"}, s=WHOLE)]},
    {"oneOf": [obj("a", a=WHOLE), obj("b", b=WHOLE)]}, {"allOf": [WHOLE]}, {"allOf": [{"$ref": "#/$defs/w"}],
    "$defs": {"w": WHOLE}},
    {"anyOf": [{"anyOf": [{"const": i}, {"const": str(i)}]} for i in range(20)]},
    # depth, and odd but valid
    nested(4), nested(12), nested(40), {"$comment": "nothing but notes", "enum": [1], "x-own": {"not": {}}},
    {"$schema": "https://json-schema.org/draft/2019-09/schema", **obj("a", a=FLAG)},
    {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3, "exclusiveMinimum": True,
    "maximum": 9},
    {"$schema": "http://json-schema.org/draft-06/schema#", "const": 3}, {"$id": "https://example.org/s",
    "type": "null"},
]  # fmt: skip

MORE_SCHEMAS: list[Any] = [
    # keywords next to each other, for the second compiler
    {"type": "integer", "multipleOf": 3}, {"type": "number", "multipleOf": 0.25},
    {"allOf": [WHOLE, {"minimum": 5}]}, obj("a", a=WHOLE) | {"allOf": [obj("b", b=FLAG)]},
    obj(a=WHOLE) | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"type": "string", "anyOf": [WHOLE, SHORT]},
    {"$ref": "#/$defs/w", "$defs": {"w": WHOLE}, "minimum": 5},
    text(pattern="^a+$", minLength=3), text(pattern="^a+$", maxLength=3), text(format="date", pattern="^2"),
    text(format="uri", maxLength=9), text(format="uri-reference", minLength=1),
    {"minimum": 3, "maxLength": 2}, {"type": "number", "minimum": 0.1234567},
    {"type": "object", "patternProperties": {"^a": FLAG}, "required": ["abc"]},
    obj(a=False) | {"additionalProperties": True},
    # formats that xgrammar has none of
    text(format="json-pointer"), text(format="idn-email"), text(format="iri"),
    {"type": "object", "propertyNames": {"format": "ipv6"}},
]  # fmt: skip

UNENFORCEABLE: list[Any] = [
    {"not": {"const": 1}}, obj(a={"not": {"type": "null"}}), items({}, uniqueItems=True), text(format="my-own"),
    text(minlength=3), text(contentEncoding="base64"), text(pattern="[a[:alpha:]]"), text(pattern="[]a]"),
    items({}, contains={"const": 1}),
    items({}, contains={}, minContains=2), {"if": WHOLE, "then": {"minimum": 3}, "else": FLAG},
    obj(a=FLAG, b=FLAG) | {"dependentRequired": {"a": ["b"]}}, obj(a=FLAG) | {"dependentSchemas": {"a": obj("b",
    b=FLAG)}},
    {"$schema": "http://json-schema.org/draft-07/schema#", **obj(a=FLAG), "dependencies": {"a": ["b"]}},
    {"allOf": [WHOLE, {"not": {"const": 5}}]}, {"$ref": "https://example.org/schema.json"},
    {"$ref": "other.json#/$defs/a"}, {"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}, {"$dynamicRef": "#x"},
    {"$defs": {"a": {"$id": "https://example.org/a", "type": "null"}}, "$ref": "#/$defs/a"},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]}, {"oneOf": [WHOLE, {"type": "integer", "minimum": 50}]},
    {"oneOf": [obj(a=WHOLE), obj(a=WHOLE, b=FLAG)]}, {"oneOf": [text(pattern="^a"), text(pattern="^b")]},
    text(pattern="^(?=a)b"), text(pattern="a(?!b)"), text(pattern="(?<=a)b"), text(pattern=r"(a)\1"),
    text(pattern=r"\bword\b"),
    text(pattern="a^b"), text(pattern="(?i)abc"), text(pattern='^"quoted"$'), text(pattern=r"^back\\slash$"),
    text(pattern="^a\nb$"),
    text(format="regex"), {"type": "number", "maximum": 1e18},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.000001}, {"type": "integer", "minimum": 2**64},
    {"type": "object", "minProperties": 2}, obj(a=FLAG) | {"minProperties": 2, "additionalProperties": True},
    {"type": "object", "patternProperties": {"^a": FLAG, "^b": WHOLE}},
    obj(ab=FLAG) | {"patternProperties": {"^a": WHOLE}},
    obj(a=FLAG) | {"propertyNames": {"pattern": "^b"}}, obj(a=FLAG) | {"additionalProperties": True,
    "propertyNames": {"maxLength": 2}},
    {"type": "object", "patternProperties": {"(?=a)": FLAG}},
]  # fmt: skip
"""Schemas with keywords that no grammar can enforce."""

PATTERNS = [
    "abc", "[a-f]{3,9}", "a|bc|def", "(yes|no)( and (yes|no)){0,3}", r"\d{4}-\d{2}-\d{2}", "[0-9]{1,3}(\\.[0-9]{2})?",
    "a?b*c+",
    r"\w{1,8}@\w{1,8}\.com", "(a|b)*abb", "^anchored$", "^(one|^two)$", r"\Awhole\Z", "x{0}y", "(?:group){2}",
    "(?P<name>n+)m",
    r"[\w.-]{2,5}", r"[^\W\d_]{3}", r"[^a-z\s]{2,4}", r"\S+\s\S+", ".{5}", ".+", r"\.\*\+\?\(\)\[\]\{\}\|\^\$\\",
    "[]a]{2}", "[a\\]b]+", "[^]]{2}",
    "é{2,3}", "[à-ÿ]{2}", "日本|日", "😀{2}", "[😀-😄]", r"é\x41\t", "\\\n", "a{2,}", "a{,3}b", "a{3}", "a+?b*?c??",
    "(((((a)))))", "(a|(b|(c|d)))",
    "[ab]{1,200}", "(a{1,20}){1,20}", "a+a+b", "(a|b)*b", "(ab*)*b", "(a|ab)+c", "x+x+y", "([a-zA-Z]_?)*z",
    "(.{0,9}){3}=", "(a?){12}a{12}",
    "a||b", "(|a)b", "(a|)(b|)c", "-?(0|[1-9][0-9]*)", r'"([^"\\]|\\.){0,9}"', r"#[0-9a-fA-F]{6}",
    "[+-]?[0-9]+(e[0-9]+)?", " +x", "\tx\n?",
    r"[\d\D]{2}", r"[\s\S]{3}", "[a-c-]{3}", "[--/]{2}", "(?:a|b){2}(?:c|d)?", "[0-9a-f]{8}-[0-9a-f]{4}",
    "(Mon|Tue|Wed|Thu|Fri|Sat|Sun)day",
]  # fmt: skip
"""Valid patterns in Python's syntax, which must match the whole text."""

GRAMMARS = {
    'root ::= "a"': "a",
    'root ::= "(" root ")" | "x"': None,
    'root ::= [a-z]+ "=" [0-9]{1,3}': "[a-z]+=[0-9]{1,3}",
    'root ::= pair ("," pair){0,2}\npair ::= key ":" key\nkey ::= [a-c]': "[a-c]:[a-c](,[a-c]:[a-c]){0,2}",
    'root ::= "yes" | "no" | "maybe"': "yes|no|maybe",
    'root ::= ("ab" | "ba")* "!"': "(ab|ba)*!",
    'root ::= "" | "b" root': "b*",
    "root ::= [^a-z\\n]{2}": "[^a-z\n]{2}",
    'root ::= "\\"" [^"]* "\\""': '"[^"]*"',
    'root ::= "日" "本"? | "😀"': "日本?|😀",
    'root ::= "\\u00e9" [\\u0041-\\u0043]': "é[A-C]",
    'root ::= term (("+" | "-") term){0,3} # a comment\nterm ::= [0-9] | "(" root ")"': None,
    'root   ::=   a   b\na::="x"\nb::="y"|"z"': "x[yz]",
    'root ::= "a"{2,4} "b"{3} "c"{0,1}': "a{2,4}b{3}c?",
    'root ::= line{1,3}\nline ::= "- " [a-z ]{1,8} "\\n"': "(- [a-z ]{1,8}\n){1,3}",
    'root ::= s\ns ::= "a" s "b" | "ab"': None,
    'root ::= (("a" | "b") | ("c" ("d" | "e")))+ "."': r"([ab]|c[de])+\.",
    'root ::= a [cd]\na ::= "a" "b"? (=[cd])': "ab?[cd]",
}
"""Grammar -> equivalent pattern; None if no pattern is equivalent."""

CHOICES = [
    ["one"], ["yes", "no"], ["a", "ab", "abc", "abcd"], ["red", "green", "blue", "re", "gr"], ["日本", "日", "本"],
    ["😀", "é", "ñ"],
    ['"', "\\", "\n", "\t", "'"], [" ", "  ", "   x"], ["true", "false", "null", "1", "1.0"], ["root ::= x", "[a-z]",
    "(a|b)", "{}"],
    [f"{i * 7919 % 9973}" for i in range(2000)], ["the same", "the same"], ["x" * 60, "x" * 61], ["# no comment", "a#b",
    "//"],
]  # fmt: skip


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_content(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


TAGS: list[Any] = [
    {"type": "structural_tag", "format": tag("<a>", json_content(obj("x", x=WHOLE)), "</a>")},
    {"format": tag("<a>", {"type": "regex", "pattern": "[0-9]{2}"}, "</a>")},
    {"format": tag("<a>", {"type": "grammar", "grammar": 'root ::= "q" | "r"'}, "</a>")},
    {"format": {"type": "const_string", "value": "exactly this"}}, {"format": json_content(SHORT)},
    {"format": {"type": "or", "elements": [{"type": "const_string", "value": "l"}, tag("<", json_content(FLAG), ">")]}},
    {"format": {"type": "sequence", "elements": [{"type": "regex", "pattern": "[ab]{3}"}, json_content(WHOLE)]}},
    {"format": {
        "type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<f>", json_content(WHOLE), "</f>")],
        "at_least_one": True, "stop_after_first": True}},
    {"format": {
        "type": "tags_with_separator", "separator": ", ", "tags": [tag("<", json_content(FLAG), ">")],
        "at_least_one": True, "stop_after_first": True}},
    {"format": tag("<|call|>", json_content(obj("n", n=WHOLE)), "<|call|>")},
]  # fmt: skip

INVALID: list[tuple[str, Any]] = [
    *(("json_schema", schema) for schema in (
        "{", "[]", "12", "", '{"type": "object",}', "false", {"type": "strin"}, {"type": 3}, {"enum": []},
        {"enum": "a"}, {"anyOf": []},
        {"anyOf": [False]}, {"properties": []}, {"required": "a"}, {"required": [1]}, {"minLength": -1},
        {"maxItems": "3"}, {"pattern": "("},
        {"pattern": "[z-a]"}, {"$ref": "#/$defs/none"}, {"$ref": "#"}, {"$ref": 3}, {"anyOf": [{"$ref": "#"},
        {"type": "null"}]},
        {"type": "integer", "minimum": 5, "maximum": 3}, {"type": "number", "exclusiveMinimum": 1, "maximum": 1},
        {"type": "string", "minLength": 5, "maxLength": 3}, {"type": "array", "items": {}, "minItems": 3,
        "maxItems": 2},
        obj("a", a=False), obj("b", a=FLAG) | {"additionalProperties": False}, {"type": "string", "enum": [1, 2]},
        {"const": 1, "type": "null"},
        {"$schema": "http://example.org/unknown", "type": "null"}, {"const": 2**80},
        {"properties": {"a": {"type": "nothing"}}},
        {"$defs": {"n": obj("n", n={"$ref": "#/$defs/n"})}, "$ref": "#/$defs/n"}, '{"items":' * 500 + "{}" + "}" * 500,
        {"type": "array", "items": False, "minItems": 1}, obj(a=FLAG) | {"minProperties": 2},
    )),
    *(("regex", pattern) for pattern in (
        "(", ")", "[", "a{3,2}", "*a", "a**", "(?P<n", r"\p{L}", "[z-a]", "(?<name>a)", r"a\1", "(?=a)a", "a(?!b)",
        "(?<!a)b", r"\bx", "x$y",
        "(?i)x", "(?s:.)", "a++", "(?>a|b)", "(a)?(?(1)b|c)", "\\", "(" * 3000 + ")" * 3000, "x{99999999999}",
    )),
    *(("ebnf", grammar) for grammar in (
        "root", "root ::=", 'start ::= "a"', "root ::= missing", 'root ::= root "a" | "b"', 'root ::= "a" root',
        'root ::= x\nx ::= x | "a"',
        'root ::= ("a"', 'root ::= "a', "root ::= [a-", "root ::= [z-a]", 'root ::= "a"{3,2}', "just text",
        'root ::= a\na ::= b "c"\nb ::= a "d" | "e"',
    )),
    *(("structural_tag", given) for given in (
        "{", "[]", {}, {"format": {"type": "unknown"}}, {"format": tag("<a>", {"type": "regex", "pattern": "("},
        "</a>")},
        {"format": {"type": "grammar", "grammar": "root ::="}}, {"structures": "x", "triggers": []},
        {"format": json_content({"type": "integer", "minimum": 3, "maximum": 2})},
    )),
]  # fmt: skip
"""(field, value) of invalid constraints."""
