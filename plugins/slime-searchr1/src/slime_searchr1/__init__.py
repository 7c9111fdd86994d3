"""Search-R1 (2503.09516) for slime: the model searches while it answers.

plugin      registers components, options, presets and the command; checks settings; logs metrics
options     the settings
protocol    parses turns and formats search results
generate    generate function ``search_r1``: turns with searches between them
retrieval   a retriever at a URL, or the built-in one
index       BM25 over a corpus in memory
reward      reward model ``search_r1``: exact match and form
serve       the command ``slime searchr1 serve``
world       the invented world: corpus, questions, tiny model
"""
