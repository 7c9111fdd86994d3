"""Reads, checks and encodes prompts.

From files to prompts:

    rows        rows by their number: of JSON Lines, found through an index, and of files that prompt formats open; the
                prompt of a row; every mistake names file and line
    row_checks  checks of what a row requests: reward model, generate function, sampling

From prompts to groups:

    numbered    prompts by their number in the run, their groups, and a cursor: the shared base of data sources
    requests    requests for prompt files from the settings (PromptRequest, PromptFilter); selects the prompts that are
                short enough, and counts the rows that are left out

    screen      checks of prompt files before anything expensive starts
    chat        encoding of a prompt and its images into token ids
    messages    chat messages in the form that a chat template reads, and messages that it leaves out

The rule between them: a prompt stays as the file has it until ``chat`` encodes it, once; JSON text of messages becomes
messages when its row is read.

This package imports ``plugins``, whose contracts it implements and whose registry holds the components that rows may
name; ``plugins`` does not import this package.
"""
