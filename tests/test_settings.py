"""Where settings come from, which source wins, and what a wrong one says."""

import json
from pathlib import Path
from typing import Any

import pytest

from hotbranch.load_settings import FIELDS, SettingsError, flag, load_settings, variable
from hotbranch.settings import Common, ReplicaSettings, RouterSettings, UpSettings


def router(
    flags: dict[str, Any] | None = None, config: Path | None = None, **environ: str
) -> RouterSettings:
    return load_settings(RouterSettings, flags or {}, environ, config)


def complaint(
    flags: dict[str, Any] | None = None, config: Path | None = None, **environ: str
) -> str:
    with pytest.raises(SettingsError) as caught:
        router(flags, config, **environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text("port: 1\nmax_open: 1\ndrain_s: 1\nkv_tokens: 4096\nreplica: [a:1]\n")
    return path


def test_the_stronger_source_wins(yaml: Path) -> None:
    environ = {"HOTBRANCH_PORT": "2", "HOTBRANCH_MAX_OPEN": "2"}
    settings = router({"port": "3"}, yaml, **environ)
    assert (settings.port, settings.max_open, settings.drain_s) == (3, 2, 1.0)
    assert settings.max_choices == RouterSettings().max_choices


def test_the_yaml_of_all_commands_may_be_named_by_the_environment(yaml: Path) -> None:
    environ = {"HOTBRANCH_CONFIG": str(yaml)}
    assert router(None, None, **environ).port == 1
    assert load_settings(ReplicaSettings, {}, environ).kv_tokens == 4096
    assert load_settings(Common, {}, environ) == Common()
    other = yaml.with_name("other.yaml")
    other.write_text("port: 9\n")
    assert router(None, other, **environ).port == 9


def test_every_setting_has_one_name_in_each_source() -> None:
    for kind in (Common, ReplicaSettings, RouterSettings, UpSettings):
        assert kind.model_fields.keys() <= FIELDS.keys()
    assert len({flag(name) for name in FIELDS}) == len({variable(name) for name in FIELDS})
    assert "config" not in FIELDS


@pytest.mark.parametrize("text", ["a:1,b:2", " a:1 , b:2,", '["a:1", "b:2"]'])
def test_a_list_in_the_environment(text: str) -> None:
    assert router(HOTBRANCH_REPLICA=text).replica == ["a:1", "b:2"]


@pytest.mark.parametrize("text", ["x=/m/x,y=/m/y=1", '{"x": "/m/x", "y": "/m/y=1"}'])
def test_a_mapping_in_the_environment(text: str) -> None:
    assert router(HOTBRANCH_MODELS=text).models == {"x": "/m/x", "y": "/m/y=1"}


def test_a_mapping_by_flags() -> None:
    assert router({"models": ["x=/m/x", "y=/m/y"]}).models == {"x": "/m/x", "y": "/m/y"}
    assert complaint({"models": ["x"]}) == "--models x: should be name=value"


def test_tenants_from_yaml_and_environment(tmp_path: Path) -> None:
    tenants = [{"name": "a", "key_sha256": "0" * 64, "isolation": "tenant", "weight": 2.0}]
    path = tmp_path / "tenants.yaml"
    path.write_text(json.dumps({"tenants": tenants}))
    assert [tenant.model_dump() for tenant in router(None, path).tenants] == tenants
    assert router(HOTBRANCH_TENANTS=json.dumps(tenants)) == router(None, path)


def test_an_empty_variable_is_an_unset_one() -> None:
    assert router(HOTBRANCH_PORT="", HOTBRANCH_REPLICA="", HOTBRANCH_CONFIG="") == router()


def test_variables_that_kubernetes_adds_are_not_settings() -> None:
    link = {
        "HOTBRANCH_SERVICE_HOST": "10.0.0.1",
        "HOTBRANCH_SERVICE_PORT_HTTP": "8080",
        "HOTBRANCH_PORT": "tcp://10.0.0.1:8080",
        "HOTBRANCH_PORT_8080_TCP_ADDR": "10.0.0.1",
        "HOTBRANCH_ROUTER_PORT": "tcp://10.0.0.1:8080",
    }
    assert router(None, None, **link) == router()


def test_a_wrong_value_names_its_source(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("max_open: 0\ntenants: [{name: a, key_sha256: my-secret}]\n")
    assert complaint({"port": "70000"}) == ("--port 70000: should be less than or equal to 65535")
    assert complaint(HOTBRANCH_DRAIN_S="soon").startswith("HOTBRANCH_DRAIN_S soon: should be a")
    both = complaint(None, path)
    assert f"{path}: max_open 0: should be greater than or equal to 1" in both
    assert f"{path}: tenants[0].key_sha256: String should match" in both
    assert "my-secret" not in both


def test_a_later_right_value_hides_an_earlier_wrong_one() -> None:
    assert router({"port": "1"}, HOTBRANCH_PORT="x").port == 1


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text("kv-tokens: 4096\n")
    assert complaint(None, path) == f"{path}: unknown setting 'kv-tokens'; did you mean kv_tokens?"
    assert complaint(HOTBRANCH_PROT="1") == (
        "unknown variable HOTBRANCH_PROT; did you mean HOTBRANCH_PORT?"
    )
    assert complaint({"prot": 1}) == "unknown setting 'prot'; did you mean port?"
    path.write_text("qqqq: 1\n")
    assert complaint(None, path) == f"{path}: unknown setting 'qqqq'"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port: [1\n", "line 2: "),
        ("- port\n", "should be a mapping of settings"),
        ("port\n", "should be a mapping of settings"),
        ("{1: 2}\n", "unknown setting 1"),
        ("\x00", "is not a YAML text"),
        ("port: !!python/object/apply:os.getcwd []\n", "line 1: could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_settings_file(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert complaint(None, path).startswith(f"{path}: {expected}")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert complaint(None, tmp_path / "none.yaml").endswith("none.yaml: No such file or directory")
    assert complaint(None, tmp_path).endswith("Is a directory")


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing yet\n")
    assert router(None, path) == router()


def test_json_that_does_not_parse() -> None:
    assert complaint(HOTBRANCH_REPLICA='["a:1"').startswith("HOTBRANCH_REPLICA: is not valid JSON")


def test_a_value_that_yaml_cannot_build(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("port: 2020-13-45\n")
    assert complaint(None, path) == f"{path}: is not a YAML text"


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:70000", "http://host:1", "h:1:2"])
def test_a_replica_is_a_host_and_a_port(address: str) -> None:
    assert complaint({"replica": [address]}).startswith(f"--replica[0] {address}: should be ")


@pytest.mark.parametrize("address", ["host:1", "10.0.0.1:65535", "[::1]:7001", "a-b.c_d:7001"])
def test_replica_addresses(address: str) -> None:
    assert router({"replica": [address]}).replica == [address]


@pytest.mark.parametrize("same", ["name", "key_sha256"])
def test_two_tenants_share_neither_name_nor_key(tmp_path: Path, same: str) -> None:
    tenants = [{"name": "a", "key_sha256": "0" * 64}, {"name": "b", "key_sha256": "1" * 64}]
    tenants[1][same] = tenants[0][same]
    path = tmp_path / "tenants.yaml"
    path.write_text(json.dumps({"tenants": tenants}))
    assert complaint(None, path) == f"{path}: tenants: two tenants have the same {same}"
    assert "000" not in complaint(None, path)
