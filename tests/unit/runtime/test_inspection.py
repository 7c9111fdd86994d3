"""The reports of several nodes about their plugins, as one message."""

from __future__ import annotations

import re
from dataclasses import astuple

from slime_core.plugins.manifest import Difference
from slime_core.runtime.session import labels, mismatch_text

VERSION = Difference("acme", "acme-tree 2.1 aaaa", "acme-tree 2.0 bbbb", "version")
CONTENT = Difference("grpo", "slime-grpo 0.1.0 cccc", "slime-grpo 0.1.0 dddd", "content of slime_grpo/losses.py")


def test_all_differences_of_all_nodes_are_one_table_and_broken_plugins_follow():
    differing = {"two (10.0.0.2)": [VERSION, CONTENT], "three (10.0.0.3)": [CONTENT]}
    broken = {"four (10.0.0.4)": "plugin 'acme' (acme-tree 2.1, entry point acme): importing it failed"}
    title, _, *rows, _, last = mismatch_text(differing, broken, total=5).splitlines()
    assert title.startswith("3 of 5 nodes ")
    expected = [[node, *astuple(one)] for node, found in differing.items() for one in found]
    assert [re.split("  +", row.strip()) for row in rows] == expected
    assert last == f"on node four (10.0.0.4): {broken['four (10.0.0.4)']}"


def test_a_node_is_called_by_host_and_address_and_by_its_id_where_two_share_those():
    nodes = [
        {"NodeID": "aaaaaaaaaaaa", "NodeManagerHostname": "one", "NodeManagerAddress": "10.0.0.1"},
        {"NodeID": "bbbbbbbbbbbb", "NodeManagerHostname": "two", "NodeManagerAddress": "10.0.0.2"},
        {"NodeID": "cccccccccccc", "NodeManagerHostname": "two", "NodeManagerAddress": "10.0.0.2"},
    ]
    assert list(labels(nodes).values()) == ["one (10.0.0.1)", "two (10.0.0.2) bbbbbbbb", "two (10.0.0.2) cccccccc"]
