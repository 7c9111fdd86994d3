"""Prompt formats, data sources and generate functions in addition to one JSON Lines file of prompts.

plugin         the components that the plugin registers, and checks of its settings
options        its settings
formats        the prompt formats: Parquet files, folders that the datasets library saved
columnar       tables of rows from columnar files (Parquet, Arrow)
streams        the data source of streams and mixes
streamed       prompts that are read as they are needed
orders         shuffled orders that need no memory
mixed          several streams in fixed shares
buffer         the data source with a buffer
arrivals       trajectories that arrive in a file or a folder
trajectories   checks of every field of a trajectory
recorded       the generate function that trains trajectories unchanged
conversations  the generate function that trains the assistant's turns
masks          finds the assistant's tokens in a conversation
"""
