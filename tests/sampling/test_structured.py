# SPDX-License-Identifier: Apache-2.0
"""Grammars over a byte-level vocabulary, and what is refused."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vllm.errors import RequestError
from vllm.sampling.structured import GrammarCompiler, TokenGrammar, check_constraint
from vllm.sampling_params import StructuredOutputsParams

EOS = 0
VOCAB = 300  # padded beyond the tokenizer's 257, as model vocabularies are


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    vocab = {"<|end|>": EOS}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_str, VOCAB, [EOS])


def allowed(grammar: TokenGrammar) -> list[int]:
    row = int.from_bytes(grammar.bitmask_rows([]), "little")
    return [token for token in range(VOCAB) if row >> token & 1]


def write_anything(grammar: TokenGrammar, tokenizer: Tokenizer, seed: int) -> str:
    """A text of random tokens, each of which the mask allows, up to its end."""
    rng = random.Random(seed)
    tokens: list[int] = []
    while not grammar.terminated and len(tokens) < 4000:
        choices = allowed(grammar)
        # Close what is open once the text is long.
        closing = [t for t in choices if t == EOS or tokenizer.id_to_token(t) in '"}]0']
        token = rng.choice(closing if len(tokens) > 40 and closing else choices)
        assert grammar.accept([token])
        if token == EOS:
            break
        tokens.append(token)
    return tokenizer.decode(tokens)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["dict", "text"])
def test_whatever_the_mask_allows_follows_the_schema(compiler, tokenizer, schema, seed):
    grammar = compiler(StructuredOutputsParams(json=schema))
    value = json.loads(write_anything(grammar, tokenizer, seed))
    assert set(value) == {"name", "age"}
    assert isinstance(value["name"], str) and isinstance(value["age"], int)


def test_a_choice_allows_its_strings_alone_and_ends_with_them(compiler, tokenizer):
    texts = {
        write_anything(
            compiler(StructuredOutputsParams(choice=["yes", 'n"o', "né"])),
            tokenizer,
            seed,
        )
        for seed in range(20)
    }
    assert texts == {"yes", 'n"o', "né"}


def test_a_regular_expression_ends_where_it_cannot_go_on(compiler, tokenizer):
    grammar = compiler(StructuredOutputsParams(regex="[0-9]{3}"))
    assert grammar.accept(tokenizer.encode("12").ids) and not grammar.terminated
    assert grammar.accept(tokenizer.encode("3").ids) and grammar.terminated
    assert allowed(grammar) == [EOS]


@pytest.mark.parametrize("text", ['start: "a" "b"+', 'root ::= "a" "b"+'], ids=["lark", "gbnf"])
def test_a_grammar_may_be_written_in_lark_or_gbnf(compiler, tokenizer, text):
    grammar = compiler(StructuredOutputsParams(grammar=text))
    assert grammar.accept(tokenizer.encode("ab").ids)
    assert sorted(allowed(grammar)) == sorted([EOS, *tokenizer.encode("b").ids])


def test_any_json_object_is_an_object(compiler, tokenizer):
    grammar = compiler(StructuredOutputsParams(json_object=True))
    assert allowed(grammar) == tokenizer.encode("{").ids


def test_a_forbidden_token_is_not_accepted_and_says_why(compiler, tokenizer):
    grammar = compiler(StructuredOutputsParams(choice=["yes"]))
    assert not grammar.accept(tokenizer.encode("n").ids)
    assert grammar.error


def test_the_mask_covers_the_padded_vocabulary_and_never_allows_the_padding(compiler):
    grammar = compiler(StructuredOutputsParams(regex="(?s:.)*"))
    assert len(grammar.bitmask_rows([])) == (VOCAB + 31) // 32 * 4
    assert max(allowed(grammar)) < 257


def test_rows_are_cut_where_the_model_samples_fewer_ids_than_the_tokenizer_has(tokenizer):
    wide = GrammarCompiler(tokenizer.to_str, VOCAB, [EOS])
    narrow = GrammarCompiler(tokenizer.to_str, 200, [EOS])
    rows = [c(StructuredOutputsParams(regex="[ab]")).bitmask_rows([]) for c in (wide, narrow)]
    assert len(rows[1]) == (200 + 31) // 32 * 4
    assert rows[0].startswith(rows[1])


def test_rows_after_drafts_equal_the_rows_of_a_grammar_that_took_them(compiler, tokenizer):
    constraint = StructuredOutputsParams(json=SCHEMA)
    drafted, plain = compiler(constraint), compiler(constraint)
    drafts = tokenizer.encode('{"name"').ids
    illegal = tokenizer.encode("!").ids
    assert drafted.num_allowed(drafts + illegal + drafts) == len(drafts)
    rows = [plain.bitmask_rows([])]
    for draft in drafts:
        assert plain.accept([draft])
        rows.append(plain.bitmask_rows([]))
    assert drafted.bitmask_rows(drafts) == b"".join(rows)
    assert drafted.bitmask_rows([]) == rows[0], "the drafts are rolled back"


REFUSED = {
    "regex": StructuredOutputsParams(regex="["),
    "lookahead": StructuredOutputsParams(regex="(?=a)b"),
    "type": StructuredOutputsParams(json={"type": "objct"}),
    "pattern": StructuredOutputsParams(json={"type": "string", "pattern": "(?=x)y"}),
    "not json": StructuredOutputsParams(json="{"),
    "scalar": StructuredOutputsParams(json="3"),
    "lark": StructuredOutputsParams(grammar="start: ("),
    "no choice": StructuredOutputsParams(choice=[]),
    "empty choice": StructuredOutputsParams(choice=["a", ""]),
    "too big": StructuredOutputsParams(json={"enum": [f"x{i}" for i in range(100_000)]}),
    "nothing": StructuredOutputsParams(),
    "two": StructuredOutputsParams(regex="a", choice=["a"]),
    "json_object false": StructuredOutputsParams(json_object=False),
    "unresolved": StructuredOutputsParams(json={"$ref": "#/$defs/missing"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_constraint_that_cannot_be_compiled_is_a_request_error(compiler, name):
    with pytest.raises(RequestError) as caught:
        compiler(REFUSED[name])
    assert caught.value.param == "structured_outputs"
    assert len(caught.value.message) < 450 and "\n" not in caught.value.message


@pytest.mark.parametrize("name", [n for n in REFUSED if n != "too big"])
def test_the_front_end_refuses_the_same_without_a_tokenizer(name):
    with pytest.raises(RequestError):
        check_constraint(REFUSED[name])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": [{"type": "integer"}]},
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
    ],
    ids=["draft-07 items", "self reference", "recursion"],
)
def test_unusual_but_valid_schemas_compile(compiler, schema):
    check_constraint(StructuredOutputsParams(json=schema))
    compiler(StructuredOutputsParams(json=schema))
