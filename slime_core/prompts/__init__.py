"""Reads, checks and encodes prompts.

From files to prompts:

    rows        rows by their number: of JSON Lines, found through an index, and of files that prompt formats open; the
                prompt of a row; every mistake names file and line
    row_checks  what a row may request: reward model, generate function, sampling; refused where it is read

From prompts to groups:

    numbered    prompts by their number in the run, groups of them, and a cursor: what data sources have in common
    requests    what the settings ask of prompt files (PromptRequest, PromptFilter); which prompts are short enough, and
                how many rows are left out

    screen      what can be found wrong with files before anything expensive starts
    chat        from a prompt, and from its images, to token ids

The rule between them: a prompt stays what the file says until ``chat`` turns it into ids, once.

This room stands above ``plugins``, whose contracts it fulfils and whose registry says what rows may name; ``plugins``
imports nothing of it.
"""
