"""The systemd unit names what exists, and gives a stop the time that it may take."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kvstore.cli import ExitCode
from kvstore.config import Settings
from kvstore.config_sources import FLAGS, flag_of
from tests.wire.test_sessions import SESSIONS_MAX

UNIT = Path(__file__).parents[2] / "deploy" / "kvstore.service"


@pytest.fixture(scope="module")
def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return parser["Service"]


def test_its_commands_are_ours(service: configparser.SectionProxy) -> None:
    start = shlex.split(service["ExecStart"])
    assert start[:3] == ["/usr/bin/env", "kvstore", "serve"]
    assert {word for word in start if word.startswith("--")} <= {"--config", *map(flag_of, FLAGS)}
    socket = start[start.index("--listen") + 1]
    assert socket.startswith(f"unix:/run/{service['RuntimeDirectory']}/")
    assert shlex.split(service["ExecStartPost"])[1:] == ["kvstore", "ping", "--wait", "30", "--endpoint", socket]
    refused = {ExitCode(int(code)) for code in service["RestartPreventExitStatus"].split()}
    assert refused == {ExitCode.USAGE, ExitCode.ALREADY_RUNNING}


def test_it_has_the_time_and_the_files_that_it_may_need(service: configparser.SectionProxy) -> None:
    assert int(service["TimeoutStopSec"]) > Settings.model_fields["drain_s"].default
    assert int(service["LimitNOFILE"]) > 4 * SESSIONS_MAX


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_accepts_it() -> None:
    done = subprocess.run(["systemd-analyze", "verify", str(UNIT)], capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr
