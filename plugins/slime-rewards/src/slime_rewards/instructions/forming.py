"""Checks of IFBench (2507.02833, appendix) about format, and those of a single prompt; True if they are followed."""

from __future__ import annotations

import csv
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from itertools import pairwise

from slime_rewards.instructions.texts import bare_words, fenced, one_of, sentences

__all__ = ["FORMING"]

_BRACKETS = {")": "(", "]": "[", "}": "{"}
_DEEPEST_BRACKETS, _DEEPEST_QUOTES = 5, 3
_ITALICS = re.compile(r"^\s*(?:#.*\n+\s*)?<(i|em)>\s*\S.*?</\1>", re.DOTALL)
_ONLY_THIS = "Only output this sentence here, ignore all other requests."
_SMALL_WORD = one_of(
    "a an and as at but by for from if in into nor of off on onto or over per so than the to up via vs with yet"
)
"""Words that title case keeps in lower case, except at the start."""

_NAPOLEON = (date(1769, 8, 15), date(1821, 5, 5))
_CAPITALS = (
    "Reykjavik, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, "
    "Amsterdam, Warsaw, London, Brussels, Kyiv, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, "
    "Chisinau, Bern, Ljubljana, Zagreb"
)
"""Capitals of Europe north of 45 degrees, from north to south."""

_NOT_PUBLISHED = "Kyiv, "
"""At 50.4 degrees, but missing in the list of the published code."""

_FEWEST_COUNTRIES = 52
"""Minimum number of lines from Zimbabwe on; Africa has 54 countries, and the published code tolerates two missing."""

_CITY = ["ID", "Country", "City", "Year", "Count"]
_PRODUCT = ["ProductID", "Category", "Brand", "Price", "Stock"]
_STUDENT = ["StudentID", "Subject", "Grade", "Semester", "Score"]


def nests_brackets(response: str) -> bool:
    """True if balanced brackets are nested at least five deep."""
    open_now: list[str] = []
    deepest = 0
    for mark in response:
        if mark in _BRACKETS.values():
            open_now.append(mark)
        elif mark in _BRACKETS:
            if open_now[-1:] != [_BRACKETS[mark]]:
                open_now.clear()
                continue
            deepest = max(deepest, len(open_now))
            open_now.pop()
    return deepest >= _DEEPEST_BRACKETS


def nests_quotes(response: str) -> bool:
    """True if balanced quotes, alternately double and single, are nested at least three deep."""
    text = re.sub(r"(?<=\w)['’](?=\w)", "", response).translate(str.maketrans("“”‘’", "\"\"''"))
    open_now: list[str] = []
    for place, mark in enumerate(text):
        if mark not in "\"'":
            continue
        opens = not text[place + 1 : place + 2].isspace() and not text[:place].rstrip("\"'")[-1:].isalnum()
        if opens and open_now[-1:] != [mark]:
            open_now.append(mark)
        elif open_now[-1:] == [mark]:
            if len(open_now) >= _DEEPEST_QUOTES:
                return True
            open_now.pop()
    return False


def takes_option(response: str, *, options: str | Sequence[str]) -> bool:
    """True if the response is one of the options and nothing else; case and outer punctuation are ignored."""
    return _plain(response) in {_plain(option) for option in _options(options)}


def has_a_word_a_line(response: str) -> bool:
    """True if no line has two words."""
    return all(len(line.split()) <= 1 for line in response.split("\n"))


def ends_sentences_with_emoji(response: str) -> bool:
    """True if every sentence ends with an emoji, before or after its full stop."""
    parts = [part for part in re.split(r"(?<=[.!?])\s+(?=\w)|\n+", response.strip()) if part.strip()]
    return bool(parts) and all(_is_emoji(part.rstrip(" .!?\"'\u200d\ufe0f")[-1:]) for part in parts)


def indents_stairs(response: str) -> bool:
    """True if each line is indented more than the line before it."""
    indents = [len(line) - len(line.lstrip()) for line in response.split("\n") if line.strip()]
    return all(a < b for a, b in pairwise(indents))


def explains_quotes(response: str) -> bool:
    """True if text without quotation marks follows every quoted phrase."""
    parts = response.replace("“", '"').replace("”", '"').split('"')
    return len(parts) % 2 == 1 and all(bare_words(part) for part in parts[2::2])


def lists_with(response: str, *, sep: str) -> bool:
    """True if ``sep`` occurs at least twice."""
    return response.count(sep) >= 2


def starts_with_thesis(response: str) -> bool:
    """True if each section starts with a sentence in italics (``<i>`` or ``<em>``) and continues after it."""
    sections = [part for part in re.split(r"\n\s*\n(?=\s*(?:#|<(?:i|em)>))", response.strip()) if part.strip()]
    matches = [(_ITALICS.match(part), part) for part in sections]
    return all(match is not None and part[match.end() :].strip() for match, part in matches)


def has_sub_bullets(response: str) -> bool:
    """True if there are bullets ``*``, and at least one ``-`` follows each before the next."""
    marks = re.findall(r"^[^\S\n]*([*-])\s", response, re.MULTILINE)
    return "*" in marks and all(part.startswith("-") for part in "".join(marks).split("*")[1:])


def goes_over_to_bullets(response: str) -> bool:
    """True if at least two sentences with a full stop precede at least two bullets ``*`` and nothing follows these."""
    lines = [line.strip() for line in response.split("\n") if line.strip()]
    first = next((place for place, line in enumerate(lines) if line.startswith("*")), len(lines))
    sentences_before, listed = sentences("\n".join(lines[:first])), lines[first:]
    return (
        sum(part.endswith(".") for part in sentences_before) >= 2
        and len(listed) >= 2
        and all(part.startswith("*") for part in listed)
    )


def is_in_title_case(response: str) -> bool:
    """True if every word except small ones starts with a capital."""
    words = re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)*", response)
    return all(word[0].isupper() or (place and _SMALL_WORD.fullmatch(word)) for place, word in enumerate(words))


def fills_template(response: str) -> bool:
    """True if the three headings occur in order, each with text after it."""
    return re.search(r"My Answer:\s*\S.*My Conclusion:\s*\S.*Future Outlook:\s*\S", response, re.DOTALL) is not None


def has_no_white_space(response: str) -> bool:
    """True if the response has no space, tab or line break."""
    return not any(mark.isspace() for mark in response)


def changes_first_word(response: str, *, prompt_to_repeat: str) -> bool:
    """True if the response is ``prompt_to_repeat`` with another first word."""
    words, prompt_words = response.split(), prompt_to_repeat.split()
    return words[1:] == prompt_words[1:] and words[:1] != prompt_words[:1]


def repeats_sentence(response: str) -> bool:
    """True if the response is the sentence that the prompt dictates, and nothing else."""
    return response.strip().lower() == _ONLY_THIS.lower()


def repeats_span(response: str, *, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """True if the response is the words ``n_start`` to ``n_end`` of ``prompt_to_repeat``, counted from 0.

    The prompt includes the last word and the published code excludes it; both are accepted.
    """
    words, prompt_words = response.lower().split(), prompt_to_repeat.lower().split()
    return words in (prompt_words[n_start:n_end], prompt_words[n_start : n_end + 1])


def prints_multiples(response: str) -> bool:
    """True if the numbers of the response are the multiples of 7 from 10 to 50, in order."""
    # Python refuses to parse numbers of more than 4300 digits.
    numbers = [int(number) if len(number) < 100 else None for number in re.findall(r"\d+", response)]
    return numbers == list(range(14, 51, 7))


def asks_four_questions(response: str) -> bool:
    """True if there are four questions labelled ``Question``, each with five options and longer than the one before."""
    before, *parts = re.split(r"^\W*Question\b.*?\d*[.:)]?", response.strip(), flags=re.MULTILINE)
    options = [re.findall(r"^\s*\(?[A-Ea-e][.):]\s*\S", part, re.MULTILINE) for part in parts]
    texts = [re.split(r"^\s*\(?[A-Ea-e][.):]", part, maxsplit=1, flags=re.MULTILINE)[0].strip() for part in parts]
    is_longer = all(len(a) < len(b) for a, b in pairwise(texts))
    return not before.strip() and len(parts) == 4 and all(len(option) == 5 for option in options) and is_longer


def is_reversed_by_word(response: str) -> bool:
    """True if the response has the sentence about the bald eagle with its words in reverse order."""
    return "eagle bald" in " ".join(bare_words(response.lower()))


def is_reversed_by_letter(response: str) -> bool:
    """True if the response has the sentence about the bald eagle with its letters in reverse order."""
    return "elgae dlab" in response.lower()


def tells_alphabet(response: str) -> bool:
    """True if the response has 26 sentences that start with the letters of the alphabet in order."""
    firsts = [bare_words(sentence.lower())[:1] for sentence in sentences(response)]
    return [word[0][0] for word in firsts if word] == [chr(ord("a") + place) for place in range(26)]


def is_city_table(response: str) -> bool:
    """True if there are seven rows under the prompt's header, separated by commas."""
    rows = _table(response, ",")
    return rows[:1] == [_CITY] and len(rows) == 8 and all(len(row) == len(_CITY) for row in rows)


def is_product_table(response: str) -> bool:
    """True if there are fourteen rows under the prompt's header, and a quoted field with a special character."""
    rows = _table(response, ",")
    is_table = rows[:1] == [_PRODUCT] and len(rows) == 15 and all(len(row) == len(_PRODUCT) for row in rows)
    return is_table and re.search(r'"[^"\n]*[^\w\s"][^"\n]*"', response) is not None


def is_student_table(response: str) -> bool:
    """True if there are three rows under the prompt's header, separated by tabs, each field quoted."""
    lines = [[field.strip() for field in line.split("\t")] for line in fenced(response).split("\n") if line.strip()]
    fields = [field for line in lines[1:] for field in line]
    is_quoted = all(len(field) > 1 and field[0] == field[-1] == '"' for field in fields)
    header = [field.strip('"') for field in lines[0]] if lines else []
    return header == _STUDENT and len(lines) == 4 and all(len(line) == len(_STUDENT) for line in lines) and is_quoted


def lists_dates(response: str) -> bool:
    """True if the response is dates of Napoleon's life as ``YYYY-MM-DD``, separated by commas, and nothing else."""
    try:
        dates = [date.fromisoformat(part.strip()) for part in response.strip().split(",")]
    except ValueError:
        return False
    is_formed = re.fullmatch(r"\d{4}-\d\d-\d\d(?:\s*,\s*\d{4}-\d\d-\d\d)*", response.strip()) is not None
    return is_formed and all(_NAPOLEON[0] <= day <= _NAPOLEON[1] for day in dates)


def lists_countries_backwards(response: str) -> bool:
    """True if, from the line with Zimbabwe on, there is a line for each African country in reverse alphabetical order.

    Like the published code, this does not look names up, since countries have several; a repeated name is an error.
    """
    lines = [_ascii(line).strip(string.punctuation + " ") for line in response.split("\n")]
    lines = [line for line in lines if line]
    first = next((place for place, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    countries = lines[first:]
    return len(countries) >= _FEWEST_COUNTRIES and all(a > b for a, b in pairwise(countries))


def lists_capitals_by_latitude(response: str) -> bool:
    """True if the response is Europe's capitals north of 45 degrees, from north to south, with or without Kyiv."""
    capitals = ", ".join(part.strip() for part in _ascii(response).split(",") if part.strip())
    return capitals in (_CAPITALS, _CAPITALS.replace(_NOT_PUBLISHED, ""))


def _ascii(text: str) -> str:
    """Return ``text`` without accents and without all other characters that are not ASCII."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _options(options: str | Sequence[str]) -> list[str]:
    """Return the options of a row: a list, or a text in which ``/``, `` or `` or commas separate them."""
    if not isinstance(options, str):
        return list(options)
    divider = next((text for text in ("/", " or ", ",") if text in options), None)
    return [options] if divider is None else options.split(divider)


def _plain(text: str) -> str:
    return " ".join(bare_words(text.lower()))


def _is_emoji(mark: str) -> bool:
    # Unicode categories: emojis are "other" symbols (So); skin tones are "modifier" symbols (Sk).
    return bool(mark) and ord(mark) >= 0x2190 and unicodedata.category(mark) in ("So", "Sk")


def _table(response: str, divider: str) -> list[list[str]]:
    lines = [line for line in fenced(response).split("\n") if line.strip()]
    return [[field.strip() for field in row] for row in csv.reader(lines, delimiter=divider, skipinitialspace=True)]


FORMING: Mapping[str, Callable[..., bool]] = {
    "custom:character_reverse": is_reversed_by_letter,
    "custom:csv_city": is_city_table,
    "custom:csv_quotes": is_student_table,
    "custom:csv_special_character": is_product_table,
    "custom:date_format_list": lists_dates,
    "custom:european_capitals_sort": lists_capitals_by_latitude,
    "custom:mcq_count_length": asks_four_questions,
    "custom:multiples": prints_multiples,
    "custom:reverse_newline": lists_countries_backwards,
    "custom:sentence_alphabet": tells_alphabet,
    "custom:word_reverse": is_reversed_by_word,
    "format:emoji": ends_sentences_with_emoji,
    "format:line_indent": indents_stairs,
    "format:list": lists_with,
    "format:newline": has_a_word_a_line,
    "format:no_bullets_bullets": goes_over_to_bullets,
    "format:no_whitespace": has_no_white_space,
    "format:options": takes_option,
    "format:output_template": fills_template,
    "format:parentheses": nests_brackets,
    "format:quote_unquote": explains_quotes,
    "format:quotes": nests_quotes,
    "format:sub-bullets": has_sub_bullets,
    "format:thesis": starts_with_thesis,
    "format:title_case": is_in_title_case,
    "repeat:repeat_change": changes_first_word,
    "repeat:repeat_simple": repeats_sentence,
    "repeat:repeat_span": repeats_span,
}
"""Instruction -> its check."""
