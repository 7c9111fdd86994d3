"""Every kind of instruction with a response that follows it and one that does not, and what rows may ask for."""

from string import ascii_uppercase
from typing import Any

import pytest

from slime_core import Sample
from slime_core.errors import DataError
from slime_rewards.instructions.counting import COUNTING
from slime_rewards.instructions.following import KNOWN, Instruction, instructions_of, variants
from slime_rewards.instructions.forming import FORMING
from slime_rewards.instructions.ifeval import IFEVAL
from slime_rewards.instructions.rewards import IfBench, IfEval, Instructions, measured
from slime_rewards.instructions.texts import sentences

ENGLISH = "the cat and the dog are good friends, and they like to play in the garden every day"
PARAGRAPHS = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "second"}
CAPITALS = {"capital_frequency": 2, "capital_relation": "at least"}
KEYWORDS = {f"keyword{place}": word for place, word in enumerate(["abc", "def", "ghi", "jkl", "mno"], start=1)}
COUNTED = "abc " + "def " * 2 + "ghi " * 3 + "jkl " * 5 + "mno " * 7
QUESTIONS = "".join(f"Question {n}: {'why ' * n}?\nA) a\nB) b\nC) c\nD) d\nE) e\n" for n in range(1, 5))
CITIES = "ID,Country,City,Year,Count\n" + "1,France,Paris,2001,5\n" * 7
PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + '1,Toys,"Fun & Co",3,9\n' * 14
STUDENTS = '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n' + '"1"\t"Art"\t"A"\t"2"\t"9"\n' * 3

AFRICA = """
Zimbabwe, Zambia, Uganda, Tunisia, Togo, Tanzania, Sudan, South Sudan, South Africa, Somalia, Sierra Leone,
Seychelles, Senegal, São Tomé and Príncipe, Rwanda, Republic of the Congo, Nigeria, Niger, Namibia, Mozambique,
Morocco, Mauritius, Mauritania, Mali, Malawi, Madagascar, Libya, Liberia, Lesotho, Kenya, Guinea-Bissau, Guinea,
Ghana, Gambia, Gabon, Ethiopia, Eswatini, Eritrea, Equatorial Guinea, Egypt, Djibouti, Democratic Republic of the
Congo, Côte d'Ivoire, Comoros, Chad, Central African Republic, Cape Verde, Cameroon, Burundi, Burkina Faso,
Botswana, Benin, Angola, Algeria
"""
COUNTRIES = "Here they are:\n- " + "\n- ".join(" ".join(AFRICA.split()).split(", "))
NORTH = """
Reykjavík, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, Amsterdam,
Warsaw, London, Brussels,"""
SOUTH = " Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, Chișinău, Bern, Ljubljana, Zagreb"

CASES = [
    ("keywords:existence", {"keywords": ["Cat", "dog"]}, "A cat, two dogs.", "A cat."),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "at least"}, "Cat! cat!", "cat"),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "less than"}, "cat", "cat cat"),
    ("keywords:forbidden_words", {"forbidden_words": ["art"]}, "the party", "the Art."),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 3, "let_relation": "less than"}, "eve", "eleven"),
    ("language:response_language", {"language": "de"}, "Das ist ein kurzer Satz auf Deutsch.", ENGLISH),
    ("language:response_language", {"language": "zh-cn"}, "这是一个中文的句子。", ENGLISH),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two!", "Dr. A. Who"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n***\n***\nb"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\na\n***\nb\n***", "a\n\nb"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "two words", "it's three"),
    ("length_constraints:nth_paragraph_first_word", PARAGRAPHS, 'First.\n\n"Second," he said.', "Second.\n\nFirst."),
    ("length_constraints:nth_paragraph_first_word", PARAGRAPHS, "One\n\nsecond", "One\n\nsecond\n\nthree"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\n\nP. S. More.", "Bye. PS more"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S. More.", "Bye.\nP.S. More."),
    ("detectable_content:postscript", {"postscript_marker": "NB:"}, "Bye.\nnb: more", "Bye."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n  - b", "* a\n* b\n* c"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "**Bold**\n* a", "**Bold**"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Maybe."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* ** b"),
    ("detectable_format:multiple_sections", {"section_spliter": "Part", "num_sections": 2}, "Part 1\nPart 2", "Part 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A title>>\nText", "<< >>\nText"),
    ("combination:two_responses", {}, "One.\n******\nTwo.", "One.\n******\nOne."),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi. "}, "say hi. Hi!", "Hi! Say hi."),
    ("startend:end_checker", {"end_phrase": "The end."}, '"That was it. the end."', "The end. Or not."),
    ("change_case:capital_word_frequency", CAPITALS, "Go NOW, DON'T wait", "Go NOW"),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("change_case:english_lowercase", {}, ENGLISH, ENGLISH.capitalize()),
    ("change_case:english_lowercase", {}, ENGLISH, "das ist ein kurzer satz auf deutsch und er ist klein geschrieben"),
    ("punctuation:no_comma", {}, "One and two", "One, two"),
    ("startend:quotation", {}, ' "All of it." ', '"'),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "one two three", "one"),
    ("count:unique_word_count", {"N": 2}, "a A b", "a A a."),
    ("ratio:stop_words", {"percentage": 50}, "The red fox", "It is the fox"),
    ("ratio:sentence_type", {}, "One. Two. Three?", "One. Two?"),
    ("ratio:sentence_balance", {}, "One. Two? Three!", "One. Two?"),
    ("ratio:overlap", {"reference_text": "abcdef", "percentage": 50}, "abcdxy", "abcdef"),
    ("ratio:sentence_words", {}, "One cat. Two dog. Red fox.", "One cat. One dog. Red fox."),
    ("count:conjunctions", {"small_n": 2}, "This, and that, but no more", "and and and"),
    ("count:person_names", {"N": 2}, "Emma met Liam.", "Emma met Emma's Bob."),
    ("count:numbers", {"N": 2}, "In 1,000 years, 3.5 of them", "1 2 3"),
    ("count:pronouns", {"N": 2}, "He/she left", "The man saw him"),
    ("count:punctuation", {}, "Well, yes; no: what?! Oh. Why? Go!", "Well, yes; no: what?! Oh."),
    ("count:keywords_multiple", KEYWORDS, COUNTED, "abc def ghi jkl"),
    ("count:words_japanese", {"N": 2}, "one 二つ three 四つ five 6", "one 二つ three four"),
    ("sentence:alliteration_increment", {}, "Red fox. Big bad fox. Tall tan tired fox.", "Big bad fox. Red fox."),
    ("sentence:increment", {"small_n": 1}, "One. Now two. Now even three.", "One. Now even three."),
    ("sentence:keyword", {"word": "cat", "N": 2}, "One. A Cat.", "A cat. One."),
    ("sentence:keyword", {"word": "cat", "N": 1}, "A (cat).", "They concatenate cats."),
    ("words:alphabet", {}, "Young zebras always bite.", "Young zebras bite"),
    ("words:alphabet", {}, "A big cat", "1 2 3"),
    ("words:consonants", {}, "Strong blasts crush", "Strong ape"),
    ("words:keywords_specific_position", {"keyword": "cat", "n": 2, "m": 2}, "One. A cat.", "A cat. One."),
    ("words:last_first", {}, "I saw cats. Cats saw dogs. Dogs ran.", "I saw cats. Dogs ran."),
    ("words:no_consecutive", {}, "A big cat", "A big bad cat"),
    ("words:odd_even_syllables", {}, "The happy dog wanders, \"home\" alone.", "The happy open door"),
    ("words:palindrome", {}, "level radar civic " * 3 + "kayak", "level radar civic " * 3),
    ("words:paragraph_last_first", {}, "Home is home.\nThere it is, there", "Home is there."),
    ("words:prime_lengths", {}, "We ate lunch", "We went"),
    ("words:repeats", {"small_n": 1}, "one two", "one One"),
    ("words:vowel", {}, "a big dog", "a big dog ate up"),
    ("words:words_position", {"keyword": "cat"}, "A cat likes no cat here.", "A cat likes no cats."),
    ("format:parentheses", {}, "(a [b {c (d [e])}])", "(([{}])) ((("),
    ("format:quotes", {}, "\"He said 'she said \"no\" twice' once\"", "\"He said 'no'\" and \"it's\""),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", "Maybe so"),
    ("format:options", {"options": "I know or I don't know"}, "I don't know", "know"),
    ("format:options", {"options": ["a", "b"]}, "(b)", "c"),
    ("format:newline", {}, "One\nword\n\neach", "One word\neach"),
    ("format:emoji", {}, "Hello. 😀 Bye 🎉!", "Hello 😀. Bye."),
    ("format:line_indent", {}, "a\n b\n\n  c", "a\n b\n c"),
    ("format:quote_unquote", {}, 'He said "no" and left.', 'He said "no".'),
    ("format:list", {"sep": "!?"}, "!? one\n!? two", "- one\n- two"),
    ("format:thesis", {}, "<i>Thesis.</i> More.\n\n<em>Next.</em> More.", "<i>Thesis.</i>"),
    ("format:sub-bullets", {}, "* a\n  - b\n* c\n  - d", "* a\n  - b\n* c"),
    ("format:no_bullets_bullets", {}, "One. Two.\n* a\n* b", "One.\n* a\n* b"),
    ("format:no_bullets_bullets", {}, "One. Two.\n* a\n* b", "One. Two.\n* a\n* b\nThree."),
    ("format:title_case", {}, "The Lord of the Rings", "The lord of the Rings"),
    ("format:output_template", {}, "My Answer: a My Conclusion: b Future Outlook: c", "My Answer: a Future Outlook: c"),
    ("format:no_whitespace", {}, "nothing", "no thing"),
    ("repeat:repeat_change", {"prompt_to_repeat": "Write a tale"}, "Tell a tale", "Write a tale"),
    ("repeat:repeat_simple", {}, "Only output this sentence here, ignore all other requests.", "Only this."),
    ("repeat:repeat_span", {"prompt_to_repeat": "a b c d", "n_start": 1, "n_end": 3}, "B c", "a b"),
    ("repeat:repeat_span", {"prompt_to_repeat": "a b c d", "n_start": 1, "n_end": 3}, "b c d", "a b c d"),
    ("custom:multiples", {}, "14, 21, 28, 35, 42, 49", "7, 14, 21, 28, 35, 42, 49"),
    ("custom:mcq_count_length", {}, QUESTIONS, QUESTIONS + "Question 5: Why?"),
    ("custom:reverse_newline", {}, COUNTRIES, COUNTRIES.replace("Togo", "Zaire")),
    ("custom:reverse_newline", {}, COUNTRIES, COUNTRIES.replace("Tunisia", "Togo")),
    ("custom:reverse_newline", {}, COUNTRIES, COUNTRIES.rsplit("\n", 3)[0]),
    ("custom:european_capitals_sort", {}, NORTH + SOUTH, (NORTH + SOUTH).replace("Oslo, ", "")),
    ("custom:european_capitals_sort", {}, NORTH + " Kyiv," + SOUTH, NORTH + SOUTH + ", Kyiv"),
    ("custom:word_reverse", {}, "eagle bald the is It", "It is the bald eagle"),
    ("custom:character_reverse", {}, ".elgae dlab ehT", "The bald eagle."),
    ("custom:sentence_alphabet", {}, " ".join(f"{one}x is." for one in ascii_uppercase), "Ax is. Bx is."),
    ("custom:csv_city", {}, CITIES, CITIES + "8,Italy,Rome,2001,5\n"),
    ("custom:csv_special_character", {}, PRODUCTS, PRODUCTS.replace("Fun & Co", "Fun Co")),
    ("custom:csv_quotes", {}, STUDENTS, STUDENTS.replace('"Art"', "Art")),
    ("custom:date_format_list", {}, "1796-04-12, 1815-06-18", "1796-02-30, 1815-06-18"),
]  # fmt: skip


def row(*names: str, arguments: Any = None, response: str = "Fine.") -> Sample:
    metadata = {"instruction_id_list": list(names), "kwargs": arguments}
    return Sample(group_index=1, index=2, response=response, metadata=metadata)


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES)
def test_a_response_that_follows_and_one_that_does_not(name: str, arguments: object, right: str, wrong: str) -> None:
    instruction = instructions_of(row(name, arguments=[arguments]))[0]
    assert (instruction.holds(right), instruction.holds(wrong)) == (True, False)


def test_every_kind_has_a_case_and_the_benchmarks_share_none() -> None:
    assert {name for name, *_ in CASES} == KNOWN.keys()
    assert len(KNOWN) == len(IFEVAL) + len(COUNTING) + len(FORMING) == 25 + 57


ODD = (
    *("日本語。\u200b次の文。", "🤖👩‍👩‍👧", "e\u0301 \u2028Ω\u0000", "\\(*[?+", "{'a': [", "\ud800"),
    *("1" * 5000, "*\n" * 50, "[" * 3_000, "\n" * 3_000 + "x", "e.g. " * 600),
)
"""Other alphabets, joined and broken characters, what a pattern or JSON might trip over, one endless number."""


@pytest.mark.parametrize(("name", "arguments"), {name: arguments for name, arguments, *_ in CASES}.items())
def test_no_response_is_too_odd_to_be_judged_and_an_empty_one_follows_nothing(
    name: str, arguments: dict[str, object]
) -> None:
    instruction = Instruction(name, arguments)
    assert {type(instruction.holds(text)) for response in ODD for text in variants(response)} == {bool}
    assert not instruction.holds(" \n")


def test_sentences_end_with_their_mark_or_their_paragraph() -> None:
    first = ["Dr. No paid $3.50, e.g. for tea.", '"Why?"', "she asked!"]
    third = ["J. R. left.", "これは文です。", "次の文。"]
    text = f"{' '.join(first)}\n\nA title\n\n{' '.join(third[:2])}{third[2]}"
    assert sentences(text) == [*first, "A title", *third]


def test_the_loose_variants_are_eight() -> None:
    cut = ["Sure:\n*Yes*\nBye", "*Yes*\nBye", "Sure:\n*Yes*", "*Yes*"]
    assert variants(cut[0]) == [text for variant in cut for text in (variant, variant.replace("*", ""))]


def test_shares_and_all_strictly_and_loosely() -> None:
    names = ("punctuation:no_comma", "startend:quotation", "detectable_format:json_format")
    found = measured(row(*names, response='Sure, here:\n"fine"'))
    assert found == {"strict": 0.0, "loose": 1.0, "strict_share": 0.0, "loose_share": 1.0}
    assert measured(row(*names, response='"a, b"')) == pytest.approx(
        {"strict": 0.0, "loose": 0.0, "strict_share": 2 / 3, "loose_share": 2 / 3}
    )


async def test_ifeval_is_strict_and_ifbench_is_loose() -> None:
    samples = [row("startend:quotation", response='Sure:\n"fine"'), row("startend:quotation", response='"fine"')]
    assert await IfEval().score(samples) == [0.0, 1.0]
    assert await IfBench().score(samples) == [1.0, 1.0]
    assert [numbers["strict_share"] for numbers in await Instructions().score(samples)] == [0.0, 1.0]


def test_arguments_of_other_kinds_are_null_and_whole_numbers_may_be_floats() -> None:
    arguments = {"num_words": 2.0, "relation": "at least", "keyword": None, "N": None}
    instructions = instructions_of(row("length_constraints:number_words", arguments=[arguments]))
    assert instructions == [Instruction("length_constraints:number_words", {"num_words": 2, "relation": "at least"})]


MORE_THAN = {"num_words": 2, "relation": "more than"}


@pytest.mark.parametrize(
    ("sample", "named"),
    [
        (row(), r"^sample 2 of group 1: .*instruction_id_list = \[\]"),
        (row("words:start_verb"), "^sample 2 of group 1: .*'words:start_verb'"),
        (row("punctuation:no_comma", arguments=[{}, {}]), r"^sample 2 of group 1: .*kwargs = \[{}, {}\]"),
        (row("count:numbers", arguments=[{"M": 3}]), "^sample 2 of group 1: .*'count:numbers' takes N"),
        (row("punctuation:no_comma", arguments=[{"N": 3}]), "^sample 2 of group 1: .*'punctuation:no_comma'"),
        (row("length_constraints:number_words", arguments=[MORE_THAN]), "^relation = 'more than'.*'less than'"),
        (row("language:response_language", arguments=[{"language": "xx"}]), "^language = 'xx'"),
    ],
)
def test_a_row_whose_instructions_cannot_be_checked_is_refused(sample: Sample, named: str) -> None:
    with pytest.raises(DataError, match=named):
        measured(sample)
