"""Prompt files of every format, data sources, and generate functions that train recorded responses.

From files to rows:

    paths          paths of prompts: files, folders, patterns, slices
    formats        opens the files of a path
    tables         rows by number, of one file and of several
    lines          JSON Lines
    columnar       Parquet, and Arrow files of the datasets library
    rows           the prompt of a row

From rows to prompt groups:

    numbered       prompts by their number in the run, their groups, and a cursor; rows in memory
    streamed       rows that are read as they are needed
    orders         shuffled orders that need no memory
    mixed          several streams in fixed shares
    prompt_files   the data source of these
    screen         checks of prompt files before a run

Recorded responses:

    buffer         the data source with a buffer
    arrivals       trajectories that arrive in a file or a folder
    trajectories   checks of every field of a trajectory
    recorded       the generate function that trains trajectories unchanged
    conversations  the generate function that trains the assistant's turns
    masks          finds the assistant's tokens in a conversation

A prompt stays as the file has it until the core encodes it, except that JSON text of messages becomes messages.
"""
