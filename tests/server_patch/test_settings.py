"""The plugin's environment variables."""

import pytest

from eyas_capture import contract, plugin
from eyas_capture.settings import DEFAULT_QUEUE_BYTES, Settings, SettingsError

DUMP = {contract.ENV_DUMP_DIR: "/dumps"}


def test_one_variable_is_enough() -> None:
    assert Settings.from_env(DUMP) == Settings(None, "all", DEFAULT_QUEUE_BYTES, "block")


def test_sglangs_capture_points_are_one_more_than_blocks() -> None:
    blocks = Settings.from_env(DUMP | {contract.ENV_AFTER_BLOCK: "2,30,58"})
    points = Settings.from_env(DUMP | {contract.ENV_CAPTURE_POINTS: "3, 31, 59"})
    assert blocks.after_block == points.after_block == (2, 30, 58)


@pytest.mark.parametrize(
    "variables",
    [
        {contract.ENV_AFTER_BLOCK: "2,x"},
        {contract.ENV_AFTER_BLOCK: "3,2"},
        {contract.ENV_AFTER_BLOCK: "2,2"},
        {contract.ENV_AFTER_BLOCK: "-1"},
        {contract.ENV_CAPTURE_POINTS: "0,2"},
        {contract.ENV_MODE: "some"},
        {contract.ENV_QUEUE_BYTES: "4GB"},
        {contract.ENV_QUEUE_BYTES: "0"},
        {contract.ENV_WHEN_FULL: "drop"},
    ],
)
def test_nonsense_is_refused_by_the_variables_name(variables: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=next(iter(variables))):
        Settings.from_env(DUMP | variables)


def test_blocks_and_points_together_are_refused() -> None:
    with pytest.raises(SettingsError, match="keep one"):
        Settings.from_env(DUMP | {contract.ENV_AFTER_BLOCK: "2", contract.ENV_CAPTURE_POINTS: "3"})


def test_without_the_variable_the_plugin_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(contract.ENV_DUMP_DIR, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "eyas_capture.lifecycle", None)  # importing it would raise
    plugin.register()
