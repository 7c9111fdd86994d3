"""Where prompts come from besides JSON Lines.

plugin    what the plugin declares
formats   the prompt formats: Parquet files, folders that the datasets library saved
columnar  the rows of an open file of columns
conversations  the generate function that trains the assistant's turns
masks     which tokens of a conversation those are
"""
