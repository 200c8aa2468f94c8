import pytest
from huggingface_hub import constants

from ..hub_server import TOKEN, HubServer


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub of this test's own, in place of the real one, and an empty cache."""
    with HubServer() as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
