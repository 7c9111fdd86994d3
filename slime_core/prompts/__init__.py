"""Where prompts come from.

From files to rows:

    tables      rows by their number: of JSON Lines, and of what the prompt formats open
    line_index  where the lines of a file begin, and that it stays as it was found
    cells       values of rows as a run takes them

From rows to prompts:

    rows        a prompt of a row; every mistake names file and line
    row_checks  what a row asks for: reward and generate function; refused where it is read
    row_sampling    the sampling that a row asks for
    lengths     which prompts are short enough
    left_out    rows that are left out: which, why, how many

From prompts to groups:

    numbered    prompts by their number in the run, groups of them, and a cursor: what data sources have in common
    requests    what the settings ask of prompt files (PromptRequest, PromptFilter)

    screen      what can be found wrong with files before anything expensive starts
    chat, processing    from a prompt, and from its images, to token ids

The rule between them: a prompt stays what the file says until ``chat`` or ``processing`` turns it into ids, once.

This room stands above ``plugins``, whose contracts it fulfils and whose registry says what rows may name; ``plugins``
imports nothing of it.
"""
