"""What tests of the core and of plugins are written with: stand-ins that are held to the real thing by tests of their
own.

    fake_engine.py  an inference server without a model, for speed and for faults
"""
