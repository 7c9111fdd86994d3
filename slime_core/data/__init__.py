"""Where prompts come from.

    rows.py      reads a file of JSON objects, naming file and line of every mistake
    prompts.py   the built-in data source: prompt groups from such a file, shuffled by epoch, with a cursor
    screen.py    what can be found wrong with a file and its prompts' lengths before anything expensive starts
    chat.py      from a prompt to token ids, with the checkpoint's own tokenizer and chat template

The rule between them: a prompt stays what the file says until ``chat.py`` turns it into ids, once.
"""
