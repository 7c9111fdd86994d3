"""Prompts as the model reads them: messages, chat templates, token ids. Data sources read the files (slime-datasets).

    chat      encodes a prompt and its images into token ids
    messages  brings chat messages to the form that a chat template reads, and finds messages that it leaves out

A prompt stays as its data source returned it until ``chat`` encodes it, once.
"""
