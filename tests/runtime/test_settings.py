"""Settings: where they come from, and one clear line for each that is wrong."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import pydantic
import pytest
from pydantic import Field

from evolving.runtime.settings import ServiceSettings, SettingsError, is_loopback, join_address, split_address
from evolving.runtime.settings_loader import load, to_toml


class TestSettings(ServiceSettings):
    """Serve tests."""

    __test__ = False  # pytest: not a class of tests
    service: ClassVar[str] = "test"
    wait_s: float = Field(2.0, gt=0, description="how long to wait, seconds")
    mode: Literal["fast", "safe"] = Field("safe", description="what to favour")
    verbose: bool = Field(False, description="whether to say more")
    weights: dict[str, float] = Field({}, description="weight of each node, by id")
    peers: tuple[str, ...] = Field((), description="names of peers, comma-separated")
    model_dir: Path | None = Field(None, description="directory of the model")


class Required(ServiceSettings):
    """Serve with something that has no default."""

    service: ClassVar[str] = "test"
    node_id: str = Field(description="this node's name")


def read(*argv: str, env: dict[str, str] | None = None) -> TestSettings:
    return load(TestSettings, argv, environ=env or {})


def refused(capsys: pytest.CaptureFixture[str], argv: Sequence[str], env: dict[str, str] | None = None) -> list[str]:
    """The lines on stderr of settings that are refused with status 2."""
    with pytest.raises(SystemExit) as exit_:
        load(TestSettings, argv, environ=env or {})
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].endswith("--help to see every setting")
    assert all(line.startswith("evolving-test: ") for line in lines)
    return [line.removeprefix("evolving-test: ") for line in lines[:-1]]


def test_defaults_are_valid_and_frozen() -> None:
    settings = read()
    assert settings.wait_s == 2.0
    with pytest.raises(pydantic.ValidationError):
        settings.wait_s = 3.0  # type: ignore[misc]


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "test.toml"
    file.write_text('wait_s = 3.0\nmode = "fast"\npartition_id = "p7"\npeers = ["x"]\n')
    env = {"EVOLVING_TEST_WAIT_S": "4", "EVOLVING_TEST_MODE": "safe", "EVOLVING_TEST_CONFIG": str(file)}
    settings = read("--wait-s=5", env=env)
    assert (settings.wait_s, settings.mode, settings.partition_id, settings.peers) == (5.0, "safe", "p7", ("x",))


def test_yaml_files_are_read_too(tmp_path: Path) -> None:
    file = tmp_path / "test.yaml"
    file.write_text("wait_s: 3\nweights: {a: 1.5}\n")
    settings = read("--config", str(file))
    assert (settings.wait_s, settings.weights) == (3.0, {"a": 1.5})


def test_lists_booleans_mappings_and_none_from_text() -> None:
    settings = read("--etcd-endpoints", "a:1, b:2", "--verbose", "--weights", '{"n": 2}')
    assert settings.etcd_endpoints == ("a:1", "b:2")
    assert settings.verbose
    assert settings.weights == {"n": 2.0}
    env = {"EVOLVING_TEST_VERBOSE": "true", "EVOLVING_TEST_MODEL_DIR": "", "EVOLVING_TEST_PEERS": "x,y"}
    settings = read("--no-verbose", env=env)
    assert not settings.verbose
    assert settings.model_dir is None
    assert settings.peers == ("x", "y")


def test_each_wrong_setting_has_its_line_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    lines = refused(capsys, ["--wait-s=-1", "--mode=slow"], {"EVOLVING_TEST_LISTEN": "nowhere"})
    assert len(lines) == 3
    by_flag = {line.partition(":")[0]: line for line in lines}
    assert set(by_flag) == {"--wait-s", "--mode", "--listen"}
    assert "from flag" in by_flag["--wait-s"]
    assert "how long to wait, seconds" in by_flag["--wait-s"]
    assert "'fast' or 'safe'" in by_flag["--mode"]
    assert "EVOLVING_TEST_LISTEN" in by_flag["--listen"]
    assert "host:port" in by_flag["--listen"]


def test_unknown_names_are_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refused(capsys, ["--wait=3"]) == ["--wait: no such option; did you mean --wait-s?"]
    (line,) = refused(capsys, [], {"EVOLVING_TEST_WAITS": "3"})
    assert "did you mean EVOLVING_TEST_WAIT_S?" in line
    file = tmp_path / "test.toml"
    file.write_text("waits = 3\n")
    (line,) = refused(capsys, ["--config", str(file)])
    assert "did you mean wait_s?" in line
    assert str(file) in line


def test_what_kubernetes_puts_into_pods_is_not_a_setting() -> None:
    read(env={"EVOLVING_TEST_PORT": "tcp://10.0.0.1:80", "EVOLVING_TEST_SERVICE_HOST": "10.0.0.1"})
    read(env={"EVOLVING_TEST_PORT_80_TCP_ADDR": "10.0.0.1", "EVOLVING_OTHER_ANYTHING": "x"})


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.toml", "wait_s = ", "not valid TOML"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.yaml", "- a", "names and values"),
        ("a.toml", None, "can't be read"),
    ],
)
def test_a_bad_file_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: str | None, said: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    (line,) = refused(capsys, ["--config", str(file)])
    assert line.startswith("--config:")
    assert said in line


def test_a_flag_without_its_value_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = refused(capsys, ["--wait-s"])
    assert "--wait-s" in line


def test_a_missing_required_setting_names_flag_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        load(Required, [], environ={})
    assert exit_.value.code == 2
    line = capsys.readouterr().err.splitlines()[0]
    for part in ("--node-id", "EVOLVING_TEST_NODE_ID", "this node's name"):
        assert part in line


def test_without_credentials_only_loopback_may_be_bound(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (line,) = refused(capsys, ["--listen=0.0.0.0:7000", "--advertise=host:7000"])
    assert line.startswith("--listen:")
    assert "credentials_file" in line
    for loopback in ("127.0.0.1:0", "localhost:1", "[::1]:1"):
        read(f"--listen={loopback}")
    read("--listen=0.0.0.0:7000", "--advertise=host:7000", f"--credentials-file={tmp_path}/c.toml")


def test_a_wildcard_address_needs_one_to_advertise(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (line,) = refused(capsys, ["--listen=[::]:7000", f"--credentials-file={tmp_path}/c.toml"])
    assert line.startswith("--advertise:")


def test_help_names_every_setting_with_description_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        read("--help")
    assert exit_.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Serve tests." in out
    for name, field in TestSettings.model_fields.items():
        assert "--" + name.replace("_", "-") in out
        assert field.description is not None
        assert " ".join(field.description.split()) in out
        assert f"EVOLVING_TEST_{name.upper()}" in out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        read("--version")
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("evolving-test ")


def test_print_config_is_a_file_that_reads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--wait-s=9.5", "--etcd-endpoints=a:1,b:2", '--weights={"n-1": 2}', "--verbose", "--listen=[::1]:70"]
    with pytest.raises(SystemExit) as exit_:
        read(*flags, "--print-config")
    assert exit_.value.code == 0
    file = tmp_path / "printed.toml"
    file.write_text(capsys.readouterr().out)
    assert read("--config", str(file)) == read(*flags)
    assert tomllib.loads(to_toml(read()))["partition_id"] == "p0"


@pytest.mark.parametrize(
    "address",
    ["", "host", ":80", "host:", "host:x", "host:70000", "a b:1", "::1:80", "[::1]", "[x]:1", "host:-1", "h:²"],
)
def test_what_is_not_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=re.compile("host:port|'.*'|octet", re.IGNORECASE)):
        split_address(address)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "etcd-0.etcd:2379", "[::1]:7000"])
def test_addresses_survive_splitting_and_joining(address: str) -> None:
    assert join_address(*split_address(address)) == address


def test_loopback_is_what_only_this_machine_reaches() -> None:
    assert all(is_loopback(a) for a in ("127.0.0.1:1", "127.8.8.8:1", "localhost:1", "[::1]:1"))
    assert not any(is_loopback(a) for a in ("0.0.0.0:1", "10.0.0.1:1", "host:1", "[::]:1"))


def test_the_advertised_address_is_the_bound_one_unless_told() -> None:
    assert read().advertised("127.0.0.1:4321") == "127.0.0.1:4321"
    assert read("--advertise=node-a:0").advertised("127.0.0.1:4321") == "node-a:4321"
    assert read("--advertise=node-a:99").advertised("127.0.0.1:4321") == "node-a:99"


def test_the_token_to_present_comes_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert read().bearer_token() is None
    file.write_text("secret\n")
    assert read(f"--token-file={file}").bearer_token() == "secret"
    file.write_text("\n")
    with pytest.raises(SettingsError, match="empty"):
        read(f"--token-file={file}").bearer_token()
    with pytest.raises(SettingsError, match="can't be read"):
        read(f"--token-file={tmp_path}/none").bearer_token()
