"""The invented world: its corpus, its questions and the tiny model that reads them, small enough for the wheel.

task    the entities, their facts, the questions and their split; the corpus; the tokenizer
recipe  the warm-up that leaves the checkpoint in ``model/`` with the form of a search and nothing more

Neither imports torch, and neither reads a file that the other wrote: the files next to them are what they yield, byte
for byte.
"""
