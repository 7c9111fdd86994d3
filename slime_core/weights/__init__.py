"""From the learner to the engines: the same weights, by name, in buckets, checked before and after.

    specs.py       name, dtype and shape of every weight: what is sent, what an engine expects, and whether they agree
    whole.py       whether the files of a checkpoint are whole
    bucket.py      which weights travel together, and the bytes of a bucket exactly as the server reads them
    endpoints.py   what the servers are told over HTTP, all of them at once, each call with a time limit
    transport.py   what every transport does, with one file each: distributed.py, tensor.py, disk.py
    group.py       the process group that spans learner rank 0 and all engines, for distributed
    export.py      full weights as a Hugging Face folder, for disk and for checkpoints
    checksums.py   what the engines say they hold, against what was sent
    publisher.py   one publication from pause to resume

The rule between the parts: nothing is sent before :func:`~.specs.check` has passed, because a weight of a wrong shape
kills a server, and no engine resumes before all of them have taken everything. Nothing here imports torch before it is
used.
"""
