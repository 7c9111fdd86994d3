"""Checks instructions of a prompt that a program can verify, such as words, lengths, format and language.

    texts.py       sentences, words, paragraphs and language of a response
    ifeval.py      the 25 instructions of IFEval (Zhou et al. 2023, 2311.07911)
    counting.py    instructions of IFBench (Pyatkin et al. 2025, 2507.02833) about words and sentences
    forming.py     instructions of IFBench about format, and those of a single prompt
    following.py   looks an instruction up, checks its arguments, and applies it to a response
    rewards.py     the reward models ``ifeval``, ``ifbench`` and ``instructions``

Each check is a named function of a response and the arguments of its row; it returns a bool.

Left out of IFBench is one of its 58 instructions: ``words:start_verb`` needs a part-of-speech tagger. The published
code downloads one for NLTK; the taggers that PyPI packages contain tag "Run" and "Discover" at the start of a text as
names. Sentences are split by rules here and by a trained model in the published code, so scores may differ if the
end of a sentence is ambiguous.
"""
