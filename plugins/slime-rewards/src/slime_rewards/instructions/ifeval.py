"""Checks of IFEval (2311.07911, table 4): functions of the response and the row's arguments; True if it is followed.

Ambiguous cases of the paper are decided as in the published code: words are ``\\w+``; keywords are found in any case
and inside words, forbidden words only as whole words. ``relation`` is "less than" or "at least".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from slime_rewards.instructions.texts import compare, detected, fenced, require_language, sentences, words

__all__ = ["IFEVAL"]

_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_LATIN = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*")


def has_keywords(response: str, *, keywords: Sequence[str]) -> bool:
    """True if each keyword occurs."""
    return all(keyword.lower() in response.lower() for keyword in keywords)


def repeats_keyword(response: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """True if the number of occurrences of the keyword is in ``relation`` to ``frequency``."""
    return compare(response.lower().count(keyword.lower()), relation, frequency)


def avoids_words(response: str, *, forbidden_words: Sequence[str]) -> bool:
    """True if none of the words occurs as a whole word."""
    return not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words)


def repeats_letter(response: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """True if the number of occurrences of the letter, in either case, is in ``let_relation`` to ``let_frequency``."""
    return compare(response.lower().count(letter.lower()), let_relation, let_frequency)


def is_in_language(response: str, *, language: str) -> bool:
    """True if the detected language of the response is ``language``."""
    return detected(response) == require_language(language)


def counts_sentences(response: str, *, num_sentences: int, relation: str) -> bool:
    """True if the number of sentences is in ``relation`` to ``num_sentences``."""
    return compare(len(sentences(response)), relation, num_sentences)


def counts_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """True if the response has exactly ``num_paragraphs`` paragraphs, separated by ``***``."""
    return len(_divided(response, r"\s?\*\*\*\s?")) == num_paragraphs


def counts_words(response: str, *, num_words: int, relation: str) -> bool:
    """True if the number of words is in ``relation`` to ``num_words``."""
    return compare(len(words(response)), relation, num_words)


def starts_paragraph(response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """True if there are ``num_paragraphs`` paragraphs, separated by empty lines, and one starts with ``first_word``."""
    parts = [part.strip() for part in response.split("\n\n") if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    match = re.match(r"[\"'“‘]*([^\s.,?!'\"’”]*)", parts[nth_paragraph - 1])
    return match is not None and match[1].lower() == first_word.lower()


def counts_placeholders(response: str, *, num_placeholders: int) -> bool:
    """True if the response has at least ``num_placeholders`` placeholders, such as ``[name]``."""
    return len(re.findall(r"\[.*?\]", response)) >= num_placeholders


def has_postscript(response: str, *, postscript_marker: str) -> bool:
    """True if a line or sentence starts with the marker; ``P.S.`` may have spaces between its letters."""
    marker = postscript_marker.strip().lower()
    if re.fullmatch(r"(?:p\.?\s?)+s\.?", marker):
        marker = r"\s?".join(rf"{letter}\." for letter in re.findall(r"[ps]", marker))
    else:
        marker = re.escape(marker)
    return re.search(rf"(?:^|\s){marker}", response.lower()) is not None


def counts_bullets(response: str, *, num_bullets: int) -> bool:
    """True if exactly ``num_bullets`` lines start with a bullet, ``*`` or ``-``."""
    return len(re.findall(r"^[^\S\n]*(?:\*[^*\n]|-).*$", response, re.MULTILINE)) == num_bullets


def is_constrained(response: str) -> bool:
    """True if the response contains one of the three answers that the prompt offers."""
    return any(choice in response for choice in _CHOICES)


def counts_highlights(response: str, *, num_highlights: int) -> bool:
    """True if at least ``num_highlights`` parts are between asterisks, ``*part*`` or ``**part**``."""
    once = re.findall(r"(?<!\*)\*([^\n*]+)\*(?!\*)", response)
    twice = re.findall(r"\*\*([^\n*]+)\*\*", response)
    return sum(bool(part.strip()) for part in [*once, *twice]) >= num_highlights


def counts_sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    """True if the response has at least ``num_sections`` sections with name and number, such as ``Section 1``."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections


def is_json(response: str) -> bool:
    """True if the whole response is JSON, with or without a code fence."""
    try:
        json.loads(fenced(response))
    except (ValueError, RecursionError):
        return False
    return True


def has_title(response: str) -> bool:
    """True if the response has a title between ``<<`` and ``>>``."""
    return any(title.strip("<> ") for title in re.findall(r"<<[^\n]+?>>", response))


def gives_two_responses(response: str) -> bool:
    """True if there are two different responses, separated by ``******``."""
    parts = _divided(response, r"\*{6}")
    return len(parts) == 2 and parts[0] != parts[1]


def repeats_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    """True if the response starts with ``prompt_to_repeat``."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def ends_with(response: str, *, end_phrase: str) -> bool:
    """True if the response ends with ``end_phrase``; a quotation mark may follow."""
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def counts_capital_words(response: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """True if the number of words in capitals is in ``capital_relation`` to ``capital_frequency``."""
    return compare(sum(word.isupper() for word in _LATIN.findall(response)), capital_relation, capital_frequency)


def is_in_capitals(response: str) -> bool:
    """True if the response is English in capital letters only."""
    return response.isupper() and detected(response) == "en"


def is_in_lower_case(response: str) -> bool:
    """True if the response is English in lower-case letters only."""
    return response.islower() and detected(response) == "en"


def has_no_comma(response: str) -> bool:
    """True if the response has no comma."""
    return "," not in response


def is_quoted(response: str) -> bool:
    """True if the whole response is between double quotation marks."""
    text = response.strip()
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


def _divided(response: str, divider: str) -> list[str]:
    """Split at dividers and strip; an empty first or last part is dropped, any other empty part makes it []."""
    parts = [part.strip() for part in re.split(divider, response)]
    inner = parts[1:-1]
    return [] if "" in inner else [part for part in parts if part]


IFEVAL: Mapping[str, Callable[..., bool]] = {
    "change_case:capital_word_frequency": counts_capital_words,
    "change_case:english_capital": is_in_capitals,
    "change_case:english_lowercase": is_in_lower_case,
    "combination:repeat_prompt": repeats_prompt,
    "combination:two_responses": gives_two_responses,
    "detectable_content:number_placeholders": counts_placeholders,
    "detectable_content:postscript": has_postscript,
    "detectable_format:constrained_response": is_constrained,
    "detectable_format:json_format": is_json,
    "detectable_format:multiple_sections": counts_sections,
    "detectable_format:number_bullet_lists": counts_bullets,
    "detectable_format:number_highlighted_sections": counts_highlights,
    "detectable_format:title": has_title,
    "keywords:existence": has_keywords,
    "keywords:forbidden_words": avoids_words,
    "keywords:frequency": repeats_keyword,
    "keywords:letter_frequency": repeats_letter,
    "language:response_language": is_in_language,
    "length_constraints:nth_paragraph_first_word": starts_paragraph,
    "length_constraints:number_paragraphs": counts_paragraphs,
    "length_constraints:number_sentences": counts_sentences,
    "length_constraints:number_words": counts_words,
    "punctuation:no_comma": has_no_comma,
    "startend:end_checker": ends_with,
    "startend:quotation": is_quoted,
}
"""Instruction -> its check."""
