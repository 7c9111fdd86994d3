"""Our own data source, held to the contract by the kit that plugin authors use."""

from slime_testing import DataSourceSuite


class TestPrompts(DataSourceSuite):
    component = "prompts"
