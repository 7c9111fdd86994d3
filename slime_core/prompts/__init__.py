"""Where prompts come from.

From files to rows:

    tables      rows by their number: of JSON Lines, and of what the prompt formats open
    line_index  where the lines of a file begin
    sizes       that a file stays as it was found
    cells       values of rows as a run takes them

From rows to prompts:

    rows        a prompt of a row; every mistake names file and line
    named, row_sampling    what a row says for itself: reward and generate function, sampling
    row_checks  what a row asks for, looked at where it is read
    lengths     which prompts are short enough
    bad_rows, left_out    rows that are left out: which, why, and who is told

From prompts to groups:

    requests    what the settings ask of prompt files
    stream, held    prompts by their number in the run; all of them held in memory
    prompts     groups of numbered prompts, with a cursor: what data sources that read files have in common
    recorded    rollouts on disk, to be trained again

    screen, screen_rollouts    what can be found wrong with files before anything expensive starts
    chat, processing    from a prompt, and from its images, to token ids

The rule between them: a prompt stays what the file says until ``chat`` or ``processing`` turns it into ids, once.
"""
