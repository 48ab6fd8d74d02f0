"""Address and token: where they come from, who else may read them, where they are never sent."""

from __future__ import annotations

import stat

import pytest

from oppo_client import Client, Config, ConfigError, Retries, Unreachable, config_path, load_config, save_config


def test_arguments_then_the_environment_then_the_file(monkeypatch):
    save_config(Config("https://file.example.org", "file"))
    assert load_config() == Config("https://file.example.org", "file")
    monkeypatch.setenv("OPPO_URL", "https://env.example.org/")
    monkeypatch.setenv("OPPO_TOKEN", "env")
    assert load_config() == Config("https://env.example.org", "env")
    assert load_config("http://localhost:8000", "mine") == Config("http://localhost:8000", "mine")
    assert Client().url == "https://env.example.org"


def test_a_files_token_goes_to_the_files_address_only(monkeypatch):
    save_config(Config("https://file.example.org", "file"))
    with pytest.raises(ConfigError, match="belongs to"):
        load_config("https://evil.example.org")
    assert load_config("https://file.example.org/").token == "file"
    monkeypatch.setenv("OPPO_TOKEN", "env")
    assert load_config() == Config("https://file.example.org", "env")


def test_the_file_is_its_owners_alone():
    place = save_config(Config("https://a.example.org", 'odd"\\token'))
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert load_config().token == 'odd"\\token'
    place.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_config()
    assert save_config(Config("https://b.example.org", "t")) == place
    assert [path.name for path in place.parent.iterdir()] == ["config.toml"]
    assert load_config().url == "https://b.example.org"


@pytest.mark.parametrize("text", ['url = "https://a.example.org"\nuser = "x"', "url = 3", "url =", 'url = "ftp://a"', ""])
def test_files_that_will_not_do_are_named(text):
    place = config_path()
    place.write_text(text)
    place.chmod(0o600)
    with pytest.raises(ConfigError):
        load_config(token="t")


def test_where_the_file_is(tmp_path):
    assert config_path({"OPPO_CONFIG": str(tmp_path / "x.toml")}) == tmp_path / "x.toml"
    assert config_path({"XDG_CONFIG_HOME": str(tmp_path)}) == tmp_path / "oppo" / "config.toml"
    assert str(config_path({"HOME": "/nowhere"})).endswith(".config/oppo/config.toml")


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1", "http://ho\0st", "http://x:abc", "http://x:99999", "http://x:-1", "http://a b/", "http://x/\n", "http://xn--/",
        "http://:word@x", "http://x@y",
    ],
)  # fmt: skip
def test_addresses_that_there_cannot_be_are_refused_before_anything_is_sent(url):
    with pytest.raises(ConfigError, match="not a platform URL"):
        Client(url, "t")


@pytest.mark.parametrize("host", ["a" * 300, ".."])
def test_a_name_that_nobody_can_have_is_not_reached(host):
    with Client(f"http://{host}", "t", retries=Retries(most=0)) as client, pytest.raises(Unreachable):
        client.me()


def test_without_anything_it_says_what_to_do():
    with pytest.raises(ConfigError, match="OPPO_URL and OPPO_TOKEN"):
        Client()
    with pytest.raises(ConfigError, match="No token"):
        Client("http://localhost:1")
    with pytest.raises(ConfigError, match="Copy it again"):
        Client("http://localhost:1", "two words")
    with pytest.raises(ConfigError, match="not a platform URL"):
        Client("localhost:8000", "t")


def test_no_representation_shows_the_token():
    assert "hush" not in repr(Config("https://a.example.org", "hush"))
    assert "hush" not in repr(Client("https://a.example.org", "hush"))
