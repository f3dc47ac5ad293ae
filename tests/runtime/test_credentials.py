"""Tokens: who is let in, and what happens when the file changes under a running service."""

from __future__ import annotations

from pathlib import Path

import pytest

from evolving.runtime.clock import ManualClock
from evolving.runtime.credentials import Caller, Credentials, hash_token, new_credential
from evolving.runtime.errors import Unauthenticated
from evolving.runtime.settings import SettingsError


def entry(tenant: str, token: str, scope: str = "client") -> str:
    return f'[[credential]]\ntenant = "{tenant}"\nsha256 = "{hash_token(token)}"\nscope = "{scope}"\n'


def test_without_a_file_everyone_is_the_default_tenant() -> None:
    credentials = Credentials(None, ManualClock())
    assert credentials.open
    assert credentials.caller(None) == Caller("default", "cluster")


def test_a_token_is_its_tenants(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(entry("a", "t-a") + entry("b", "t-b", "cluster"))
    credentials = Credentials(path, ManualClock())
    assert credentials.caller("Bearer t-a") == Caller("a", "client")
    assert credentials.caller("bearer t-b") == Caller("b", "cluster")


@pytest.mark.parametrize(
    "header", [None, "", "t-a", "Basic t-a", "Bearer", "Bearer ", "Bearer t-b", "Bearer t-a\udcff"]
)
def test_anything_else_is_refused(tmp_path: Path, header: str | None) -> None:
    path = tmp_path / "c.toml"
    path.write_text(entry("a", "t-a"))
    with pytest.raises(Unauthenticated):
        Credentials(path, ManualClock()).caller(header)


def test_the_token_itself_is_not_in_the_file() -> None:
    token, table = new_credential("a", "client")
    assert token not in table


def test_a_new_credential_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    token, table = new_credential("a", "cluster")
    path.write_text(table)
    assert Credentials(path, ManualClock()).caller(f"Bearer {token}") == Caller("a", "cluster")


async def test_tokens_come_and_go_with_the_file(tmp_path: Path) -> None:
    path, clock = tmp_path / "c.toml", ManualClock()
    path.write_text(entry("a", "old"))
    credentials = Credentials(path, clock)
    replacement = tmp_path / "new"
    replacement.write_text(entry("a", "new"))
    replacement.replace(path)
    await clock.advance(10)
    assert credentials.caller("Bearer new").tenant == "a"
    with pytest.raises(Unauthenticated):
        credentials.caller("Bearer old")


@pytest.mark.parametrize("content", ["[[credential", '[[credential]]\ntenant = "a"\n', None])
async def test_a_file_that_broke_leaves_the_last_good_tokens(tmp_path: Path, content: str | None) -> None:
    path, clock = tmp_path / "c.toml", ManualClock()
    path.write_text(entry("a", "t"))
    credentials = Credentials(path, clock)
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    await clock.advance(10)
    assert credentials.caller("Bearer t").tenant == "a"
    path.write_text(entry("a", "mended"))
    await clock.advance(10)
    assert credentials.caller("Bearer mended").tenant == "a"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "credential"),
        ("[[credential", "not valid TOML"),
        ('[[credential]]\ntenant = "a"\nsha256 = "12"\n', "credential.0.sha256"),
        (entry("a", "t", "root"), "credential.0.scope"),
        (entry("a b", "t"), "credential.0.tenant"),
        (entry("a", "t") + 'token = "t"\n', "credential.0.token"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(content)
    with pytest.raises(SettingsError) as error:
        Credentials(path, ManualClock())
    assert any(said in problem for problem in error.value.problems)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="can't be read"):
        Credentials(tmp_path / "none", ManualClock())
