import pytest

from ..hub_server import HubServer, use_hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub of this test's own, in place of the real one, and an empty cache."""
    with HubServer() as server:
        use_hub(server, monkeypatch, tmp_path / "cache")
        yield server
