"""Checks whether a response follows the instructions of its prompt that a program can verify: words, lengths, form,
language.

    texts.py       sentences, words and paragraphs of a response; which language it is in
    ifeval.py      the 25 kinds of IFEval (Zhou et al. 2023, 2311.07911)
    counting.py    kinds of IFBench (Pyatkin et al. 2025, 2507.02833): words and sentences
    forming.py     kinds of IFBench: form, and what one prompt alone asks for
    following.py   one instruction looked up, its arguments checked, and applied to a response
    rewards.py     the reward models ``ifeval``, ``ifbench`` and ``instructions``

The rule between them: a check is a function of a response and the arguments of its row, by name; it returns a bool.

Left out of IFBench is one of its 58 kinds: ``words:start_verb`` needs a tagger of parts of speech. The published code
downloads one for NLTK; those that come whole from PyPI take "Run" and "Discover" at the start of a text for names.
Sentences are cut by rules here and by a trained model in the published code, so that scores may differ where a
sentence's end is a matter of opinion.
"""
