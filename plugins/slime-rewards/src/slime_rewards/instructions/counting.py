"""Checks of IFBench (2507.02833, appendix) about words and sentences; True if the response follows the instruction."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import syllapy

from slime_rewards.instructions.texts import bare_words, one_of, paragraphs, sentences, words

__all__ = ["COUNTING"]

_CONJUNCTION = one_of("and but for nor or so yet")
_PRONOUN = one_of(
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers "
    "herself it its itself they them their theirs themselves"
)
_FUNCTION_WORD = one_of(
    f"{_PRONOUN.pattern} a an the this that these those what which who whom whose am is are was were be been being "
    "have has had having do does did doing will would shall should can could may might must not no nor and but or if "
    "because as until while of at by for with about against between into through during before after above below to "
    "from up down in out on off over under again further then once here there when where why how all any both each few "
    "more most other some such only own same so than too very just now"
)
"""Function words: pronouns, determiners, auxiliaries, prepositions, conjunctions, common adverbs."""

_NAME = one_of(
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin "
    "Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria "
    "Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella "
    "Jonathan"
)
"""The names that the instruction's prompt lists."""

_CLUSTER = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_MARKS = frozenset(".,!?;:")
_TIMES = (1, 2, 3, 5, 7)
_OVERLAP_SLACK = 2.0


def is_in_word_range(response: str, *, min_words: int, max_words: int) -> bool:
    """True if the response has ``min_words`` to ``max_words`` words, both included."""
    return min_words <= len(words(response)) <= max_words


def uses_unique_words(response: str, *, N: int) -> bool:
    """True if the response has at least ``N`` different words."""
    return len(set(_lower(response))) >= N


def has_few_function_words(response: str, *, percentage: float) -> bool:
    """True if at most ``percentage`` per cent of the words are function words; False without words."""
    words = _lower(response)
    return bool(words) and 100 * len(_matching(_FUNCTION_WORD, words)) <= percentage * len(words)


def has_two_statements_a_question(response: str) -> bool:
    """True if twice as many sentences end with a full stop as with a question mark."""
    ends = _ends(response)
    return ends["."] == 2 * ends["?"]


def balances_sentences(response: str) -> bool:
    """True if full stops, question marks and exclamation marks end equally many sentences."""
    ends = _ends(response)
    return ends["."] == ends["?"] == ends["!"]


def uses_conjunctions(response: str, *, small_n: int) -> bool:
    """True if the response has at least ``small_n`` different coordinating conjunctions."""
    return len(_matching(_CONJUNCTION, set(_lower(response)))) >= small_n


def names_persons(response: str, *, N: int) -> bool:
    """True if the response has at least ``N`` different names of the prompt's list."""
    return len(_matching(_NAME, set(words(response)))) >= N


def overlaps(response: str, *, reference_text: str, percentage: float) -> bool:
    """True if ``percentage`` per cent, within 2, of the response's character trigrams are in ``reference_text``."""
    trigrams, other = _trigrams(response), _trigrams(reference_text)
    return bool(trigrams) and abs(100 * len(trigrams & other) / len(trigrams) - percentage) <= _OVERLAP_SLACK


def counts_numbers(response: str, *, N: int) -> bool:
    """True if the response has exactly ``N`` numbers in digits; separators and decimal points are part of a number."""
    return len(re.findall(r"\d+(?:[.,:/-]\d+)*", response)) == N


def uses_pronouns(response: str, *, N: int) -> bool:
    """True if the response has at least ``N`` personal pronouns."""
    return len(_matching(_PRONOUN, _lower(response.replace("/", " ")))) >= N


def covers_punctuation(response: str) -> bool:
    """True if the response has every standard punctuation mark, and in addition an interrobang (``?!``)."""
    without = re.sub(r"\?!|!\?|‽", "", response, count=1)
    return without != response and set(without) >= _MARKS


def repeats_five_keywords(
    response: str, *, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> bool:
    """True if the keywords occur 1, 2, 3, 5 and 7 times."""
    keywords = (keyword1, keyword2, keyword3, keyword4, keyword5)
    counts = [response.lower().count(keyword.strip().lower()) for keyword in keywords]
    return tuple(counts) == _TIMES


def has_japanese_words(response: str, *, N: int) -> bool:
    """True if every ``N``-th word is Japanese; words without letters are ignored."""
    every = response.split()[N - 1 :: N]
    return all(_JAPANESE.search(word) or not re.search(r"[^\W\d]", word) for word in every)


def follows_alphabet(response: str) -> bool:
    """True if each word starts with the letter after that of the word before it; a follows z."""
    places = [ord(word[0]) - ord("a") for word in _lower(response)]
    return all(0 <= place < 26 for place in places) and all((b - a) % 26 == 1 for a, b in pairwise(places))


def uses_three_vowels(response: str) -> bool:
    """True if the response is one paragraph with at most three different vowels."""
    return "\n" not in response.strip() and len(set("aeiou") & set(response.lower())) <= 3


def clusters_consonants(response: str) -> bool:
    """True if every word has two adjacent consonants."""
    return all(_CLUSTER.search(word) for word in _lower(response))


def alliterates_more_and_more(response: str) -> bool:
    """True if each sentence has more words that share the first letter with an adjacent word than the one before."""
    counts = [_alliteration(_lower(sentence)) for sentence in sentences(response)]
    return all(a < b for a, b in pairwise(counts))


def has_palindromes(response: str) -> bool:
    """True if the response has at least ten palindromes of five letters or more."""
    return sum(len(word) >= 5 and word == word[::-1] for word in _lower(response)) >= 10


def has_prime_lengths(response: str) -> bool:
    """True if the length of every word is a prime number."""
    return all(_is_prime(len(word)) for word in bare_words(response))


def repeats_few_words(response: str, *, small_n: int) -> bool:
    """True if no word occurs more than ``small_n`` times."""
    return max(Counter(_lower(response)).values(), default=0) <= small_n


def has_keyword_in_sentence(response: str, *, word: str, N: int) -> bool:
    """True if sentence ``N``, counted from 1, contains ``word`` as a whole word."""
    parts = sentences(response)
    pattern = rf"(?<!\w){re.escape(word.strip())}(?!\w)"
    return 1 <= N <= len(parts) and re.search(pattern, parts[N - 1], re.IGNORECASE) is not None


def places_keyword(response: str, *, keyword: str, n: int, m: int) -> bool:
    """True if word ``m`` of sentence ``n`` is the keyword, both counted from 1."""
    parts = sentences(response)
    inner = words(parts[n - 1]) if 1 <= n <= len(parts) else []
    return 1 <= m <= len(inner) and inner[m - 1].lower() == keyword.strip().lower()


def frames_with_keyword(response: str, *, keyword: str) -> bool:
    """True if the second and the second last word are the keyword."""
    text = _lower(response)
    return len(text) > 1 and text[1] == text[-2] == keyword.strip().lower()


def chains_sentences(response: str) -> bool:
    """True if each sentence starts with the last word of the sentence before it."""
    inner = [_lower(sentence) for sentence in sentences(response)]
    return all(inner) and all(a[-1] == b[0] for a, b in pairwise(inner))


def closes_paragraphs(response: str) -> bool:
    """True if each line of text ends with its first word."""
    inner = [_lower(line) for part in paragraphs(response) for line in part.split("\n")]
    return all(paragraph[0] == paragraph[-1] for paragraph in inner if paragraph)


def grows_sentences(response: str, *, small_n: int) -> bool:
    """True if each sentence has exactly ``small_n`` more words than the sentence before it."""
    counts = [len(bare_words(sentence)) for sentence in sentences(response)]
    return all(b - a == small_n for a, b in pairwise(counts))


def changes_first_letters(response: str) -> bool:
    """True if no two adjacent words start with the same letter."""
    return all(a[0] != b[0] for a, b in pairwise(_lower(response)))


def alternates_syllables(response: str) -> bool:
    """True if words with odd and even numbers of syllables, as counted by ``syllapy``, alternate; numbers have 0."""
    parities = [syllapy.count(word) % 2 for word in _lower(response)]
    return all(a != b for a, b in pairwise(parities))


def balances_characters(response: str) -> bool:
    """True if the response has three sentences with equally many characters and without a common word."""
    parts = sentences(response)
    used = [word for sentence in parts for word in set(_lower(sentence))]
    return len(parts) == 3 and len({len(sentence) for sentence in parts}) == 1 and len(used) == len(set(used))


def _matching(pattern: re.Pattern[str], words: Iterable[str]) -> list[str]:
    return [word for word in words if pattern.fullmatch(word)]


def _lower(text: str) -> list[str]:
    return bare_words(text.lower())


def _ends(text: str) -> Counter[str]:
    return Counter(sentence.rstrip("\"'”’)]")[-1:] for sentence in sentences(text))


def _trigrams(text: str) -> set[str]:
    return {text[start : start + 3] for start in range(len(text) - 2)}


def _alliteration(words: list[str]) -> int:
    alike = [a[0] == b[0] for a, b in pairwise(words)]
    return sum(before or after for before, after in zip([False, *alike], [*alike, False], strict=True))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


COUNTING: Mapping[str, Callable[..., bool]] = {
    "count:conjunctions": uses_conjunctions,
    "count:keywords_multiple": repeats_five_keywords,
    "count:numbers": counts_numbers,
    "count:person_names": names_persons,
    "count:pronouns": uses_pronouns,
    "count:punctuation": covers_punctuation,
    "count:unique_word_count": uses_unique_words,
    "count:word_count_range": is_in_word_range,
    "count:words_japanese": has_japanese_words,
    "ratio:overlap": overlaps,
    "ratio:sentence_balance": balances_sentences,
    "ratio:sentence_type": has_two_statements_a_question,
    "ratio:sentence_words": balances_characters,
    "ratio:stop_words": has_few_function_words,
    "sentence:alliteration_increment": alliterates_more_and_more,
    "sentence:increment": grows_sentences,
    "sentence:keyword": has_keyword_in_sentence,
    "words:alphabet": follows_alphabet,
    "words:consonants": clusters_consonants,
    "words:keywords_specific_position": places_keyword,
    "words:last_first": chains_sentences,
    "words:no_consecutive": changes_first_letters,
    "words:odd_even_syllables": alternates_syllables,
    "words:palindrome": has_palindromes,
    "words:paragraph_last_first": closes_paragraphs,
    "words:prime_lengths": has_prime_lengths,
    "words:repeats": repeats_few_words,
    "words:vowel": uses_three_vowels,
    "words:words_position": frames_with_keyword,
}
"""Instruction -> its check."""
