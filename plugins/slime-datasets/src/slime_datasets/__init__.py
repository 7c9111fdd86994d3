"""Where prompts come from in addition to JSON Lines.

plugin         what the plugin declares, and what it says of settings together
options        its settings
formats        the prompt formats: Parquet files, folders that the datasets library saved
columnar       the rows of an open file of columns
streams        the data source of streams and mixes
streamed       prompts that are read as they are needed
orders         their orders, which need no memory
mixed          several streams in fixed shares
buffer         the data source with a buffer
arrivals       trajectories that arrive in a file or a folder
trajectories   what every field of such a line may hold
given          the generate function that trains trajectories as they are
conversations  the generate function that trains the assistant's turns
masks          which tokens of a conversation those are
"""
