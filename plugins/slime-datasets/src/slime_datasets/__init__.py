"""Where prompts come from besides JSON Lines.

plugin    what the plugin declares
formats   the prompt formats: Parquet files, folders that the datasets library saved
columnar  the rows of an open file of columns
"""
