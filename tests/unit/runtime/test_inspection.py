"""The reports of several nodes about their plugins, as one message."""

from __future__ import annotations

from slime_core.plugins.manifest import Difference
from slime_core.runtime.session import labels, mismatch_text

VERSION = Difference("acme", "acme-tree 2.1 aaaa", "acme-tree 2.0 bbbb", "version")
CONTENT = Difference("grpo", "slime-grpo 0.1.0 cccc", "slime-grpo 0.1.0 dddd", "content of slime_grpo/losses.py")


def test_all_differences_of_all_nodes_are_one_table_and_broken_plugins_follow():
    differing = {"two (10.0.0.2)": [VERSION, CONTENT], "three (10.0.0.3)": [CONTENT]}
    broken = {"four (10.0.0.4)": "plugin 'acme' (acme-tree 2.1, entry point acme): importing it failed"}
    assert mismatch_text(differing, broken, total=5) == (
        "3 of 5 nodes cannot run the driver's plugins; nothing was started.\n"
        "  node              plugin  driver                 found there            differs in\n"
        "  two (10.0.0.2)    acme    acme-tree 2.1 aaaa     acme-tree 2.0 bbbb     version\n"
        "  two (10.0.0.2)    grpo    slime-grpo 0.1.0 cccc  slime-grpo 0.1.0 dddd  content of slime_grpo/losses.py\n"
        "  three (10.0.0.3)  grpo    slime-grpo 0.1.0 cccc  slime-grpo 0.1.0 dddd  content of slime_grpo/losses.py\n"
        "Install the same on every node, or share one environment between the nodes.\n"
        "on node four (10.0.0.4): plugin 'acme' (acme-tree 2.1, entry point acme): importing it failed"
    )


def test_a_node_is_called_by_host_and_address_and_by_its_id_where_two_share_those():
    nodes = [
        {"NodeID": "aaaaaaaaaaaa", "NodeManagerHostname": "one", "NodeManagerAddress": "10.0.0.1"},
        {"NodeID": "bbbbbbbbbbbb", "NodeManagerHostname": "two", "NodeManagerAddress": "10.0.0.2"},
        {"NodeID": "cccccccccccc", "NodeManagerHostname": "two", "NodeManagerAddress": "10.0.0.2"},
    ]
    assert list(labels(nodes).values()) == ["one (10.0.0.1)", "two (10.0.0.2) bbbbbbbb", "two (10.0.0.2) cccccccc"]
