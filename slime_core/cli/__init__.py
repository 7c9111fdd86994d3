"""The command ``slime``: the only room that prints or exits. One file a command; ``main`` finds the command."""
