"""What lets Megatron-core and SGLang run on a machine without a GPU.

    accelerator.py   which device this process computes on
    cuda.py          what ``torch.cuda`` means to them
    megatron.py      ``install()``: an import hook for Megatron-core and mbridge, in the process that trains;
                     collectives over parts of unequal size
    serve.py         environment and arguments of an inference server that runs on a CPU; such a server, started by hand
    stand_ins/       packages that only such a server sees, through its PYTHONPATH

Nothing here acts when it is imported. The rule between the parts: ``megatron.py`` never touches torch or any third
library, and the stand-ins never reach a process that trains.
"""
