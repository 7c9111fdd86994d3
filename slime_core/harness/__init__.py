"""What test kits stand on: slime-testing, and anybody's own tests.

fake_engine    an inference server without a model, with the endpoints, refusals and pauses of SGLang
fake_server    the HTTP server that it is made of, with faults on demand
"""
