"""TLS, ACL users, wrong passwords, databases, Sentinel; and that no secret is ever shown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from kvstore.testing.tier_suite import load, name_of, present, store
from kvstore.tier import ReadOutcome, TierState, WriteOutcome
from kvstore.tiers.redis import RedisTier
from tests.redis.servers import PATIENCE_S, RedisServer, eventually, free_ports, one_server, running
from tests.redis.tiers import SHORT_S, opened, promptly, until, until_ok

KEYS = [name_of(number) for number in range(16)]
LARGE = 5 << 20
PASSWORD = "s3cret/with:odd@characters"
QUOTED = "s3cret%2Fwith%3Aodd%40characters"


async def works(tier: RedisTier) -> None:
    assert tier.state is TierState.OK
    assert await store(tier, KEYS) == [WriteOutcome.STORED] * 16
    assert await store(tier, [name_of(100)], LARGE) == [WriteOutcome.STORED]
    assert await load(tier, KEYS) == [ReadOutcome.OK] * 16
    assert await load(tier, [name_of(100)], LARGE) == [ReadOutcome.OK]
    assert await tier.delete_namespace(None) == 17


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, and a certificate of 127.0.0.1 for both sides."""
    folder = tmp_path_factory.mktemp("certificates")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        folder,
        "req",
        "-x509",
        *curve,
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-subj",
        "/CN=ca",
        "-days",
        "2",
        "-addext",
        "keyUsage=critical,keyCertSign,cRLSign",
    )
    openssl(folder, "req", *curve, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=server")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl(folder, "x509", "-req", "-in", "server.csr", "-out", "server.pem", *sign)
    return folder


def tls_options(folder: Path, port: int) -> list[str]:
    return [
        *("--port", "0", "--tls-port", str(port), "--tls-ca-cert-file", str(folder / "ca.pem")),
        *("--tls-cert-file", str(folder / "server.pem"), "--tls-key-file", str(folder / "server.key")),
    ]


@pytest.fixture(scope="module")
def tls_server(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Asks for a certificate of the client, and for a user that may do what a tier does and no more."""
    server = one_server(tmp_path_factory.mktemp("tls"))
    rules = (
        f"on >{PASSWORD} ~kv:* +get +set +getrange +exists +unlink +scan +zadd +zrem +zscan +hset +hdel +hgetall "
        "+expire +ping +info +select +client|setname"
    )
    server.options = [
        *tls_options(certificates, server.port),
        *("--user", "kv", *rules.split(), "--user", "default", "on", ">admin", "~*", "&*", "+@all"),
    ]
    server.login = {
        "ssl": True,
        "ssl_ca_certs": str(certificates / "ca.pem"),
        "ssl_certfile": str(certificates / "server.pem"),
        "ssl_keyfile": str(certificates / "server.key"),
        "password": "admin",
    }
    with running(server):
        yield server


def tls_url(server: RedisServer, folder: Path, password: str = QUOTED, ca: str = "ca.pem") -> str:
    certificate = f"ssl_certfile={folder}/server.pem&ssl_keyfile={folder}/server.key"
    return f"rediss://kv:{password}@127.0.0.1:{server.port}/3?ssl_ca_certs={folder}/{ca}&{certificate}"


async def test_tls_with_a_user_that_may_do_little_and_a_database(
    tls_server: RedisServer, certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tls_url(tls_server, certificates), key_prefix="kv:", capacity_bytes=1 << 30) as tier:
        await works(tier)
        await store(tier, KEYS)
        with tls_server.client() as client:
            assert client.info("keyspace").keys() == {"db3"}
        assert not tier.stats()["faults"]


async def test_a_wrong_password_is_said_and_the_right_one_is_never_shown(
    tls_server: RedisServer, certificates: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = "wr0ng-pass"
    async with opened(tls_url(tls_server, certificates, wrong)) as tier:
        assert tier.state is TierState.FAILED
        assert await store(tier, KEYS) == [WriteOutcome.FAILED] * 16
        assert await present(tier, KEYS) == [False] * 16
        stats = tier.stats()
        assert stats["fault"]["kind"] == "login"
        assert "WRONGPASS" in stats["fault"]["text"] or "invalid" in stats["fault"]["text"].lower()
        shown = json.dumps(stats) + repr(tier.address) + "".join(capfd.readouterr())
        assert wrong not in shown and f"kv@127.0.0.1:{tls_server.port}" in shown
    async with opened(tls_url(tls_server, certificates), key_prefix="kv:again:") as tier:
        await works(tier)
        shown = json.dumps(tier.stats()) + repr(tier.address) + "".join(capfd.readouterr())
        assert PASSWORD not in shown and QUOTED not in shown


async def test_a_certificate_of_somebody_else_is_refused(
    tls_server: RedisServer, certificates: Path, tmp_path: Path
) -> None:
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(certificates, "req", "-x509", *curve, "-keyout", "x.key", "-out", "x.pem", "-subj", "/CN=x", "-days", "2")
    async with opened(tls_url(tls_server, certificates, ca="x.pem")) as tier:
        assert tier.state is TierState.FAILED
        assert "CERTIFICATE_VERIFY_FAILED" in tier.stats()["fault"]["text"]


async def test_tls_in_trouble(certificates: Path, tmp_path: Path) -> None:
    """Paused in the middle, as without TLS."""
    server = one_server(tmp_path, login={"ssl": True, "ssl_ca_certs": str(certificates / "ca.pem")})
    server.options = [*tls_options(certificates, server.port), "--tls-auth-clients", "no"]
    url = f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={certificates}/ca.pem"
    with running(server):
        async with opened(url, deadline_s=SHORT_S) as tier:
            for paused in (True, False, True):
                await until_ok(tier)
                await store(tier, [name_of(7)], LARGE)
                loads = [asyncio.ensure_future(load(tier, [name_of(7)] * 4, LARGE)) for _ in range(3)]
                await asyncio.wait(loads, return_when=asyncio.FIRST_COMPLETED)
                loads.append(asyncio.ensure_future(load(tier, [name_of(7)] * 8, LARGE)))
                await asyncio.sleep(0)
                server.pause() if paused else loads[-1].cancel()
                for task in loads:
                    with contextlib.suppress(asyncio.CancelledError):
                        await promptly(task)
                server.resume()
            await until_ok(tier)


async def test_a_user_that_may_not_write_is_said(server: RedisServer) -> None:
    with server.client() as client:
        client.execute_command("ACL SETUSER reader on >pw ~* +@read +@connection +info")
    async with opened(f"redis://reader:pw@127.0.0.1:{server.port}") as tier:
        assert await store(tier, KEYS) == [WriteOutcome.FAILED] * 16
        assert tier.stats()["fault"]["kind"] == "login"


async def test_a_unix_socket(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("u")
    server = one_server(folder, "--unixsocket", str(folder / "s"))
    with running(server):
        async with opened(f"unix://{folder}/s?db=2") as tier:
            await works(tier)


# -- Sentinel ----------------------------------------------------------------------------------------------------------


class Sentinel(RedisServer):
    """A redis-server in Sentinel mode that watches one master."""

    def watch(self, master: RedisServer, login: str = "") -> Sentinel:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "sentinel.conf"
        config.write_text(
            f"sentinel monitor kv 127.0.0.1 {master.port} 1\nsentinel down-after-milliseconds kv 500\n"
            f"sentinel failover-timeout kv 3000\n{login}"
        )
        self.options = ["--sentinel"]
        self._config = config
        return self

    def spawn(self) -> Sentinel:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["redis-server", str(self._config), "--sentinel", "--port", str(self.port), "--bind", "127.0.0.1"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self


@pytest.mark.parametrize("and_back", [False, pytest.param(True, marks=pytest.mark.crash)])
async def test_a_failover(tmp_path: Path, and_back: bool) -> None:
    """Two Sentinels in the URL, of which one is not there; a password for the servers and another for Sentinel."""
    passwords = ("--requirepass", "pw", "--masterauth", "pw", "--repl-diskless-sync-delay", "0")
    master_port, replica_port, sentinel_port, nobody = free_ports(4)
    login = {"password": "pw"}
    master = RedisServer(tmp_path / "one", master_port, *passwords, login=login)
    replica = RedisServer(
        tmp_path / "two", replica_port, *passwords, "--replicaof", f"127.0.0.1 {master_port}", login=login
    )
    sentinel = Sentinel(tmp_path / "sentinel", sentinel_port, login={"password": "spw"})
    sentinel.watch(master, "sentinel auth-pass kv pw\nrequirepass spw\n")
    url = f"redis+sentinel://:pw@127.0.0.1:{nobody},127.0.0.1:{sentinel_port}/kv/0?sentinel_password=spw"
    with running(master, replica, sentinel):
        with replica.client() as client, sentinel.client() as watcher:
            eventually(lambda: client.info("replication").get("master_link_status") == "up", "the replica is in step")
            eventually(lambda: _knows_replica(watcher), "Sentinel knows the replica")
        async with opened(url, deadline_s=2 * SHORT_S) as tier:
            await until_ok(tier)  # on a busy machine the first question takes longer than the deadline
            assert await store(tier, KEYS) == [WriteOutcome.STORED] * 16
            with master.client() as client:
                assert client.wait(1, 30_000) == 1
            loads = [asyncio.ensure_future(load(tier, KEYS)) for _ in range(4)]
            master.kill()
            for task in loads:
                await promptly(task, 2 * SHORT_S)
            while tier.state is not TierState.FAILED:
                await promptly(load(tier, KEYS), 2 * SHORT_S)
            await until_ok(tier)
            assert await load(tier, KEYS) == [ReadOutcome.OK] * 16
            more = [name_of(200 + number) for number in range(16)]
            assert await store(tier, more) == [WriteOutcome.STORED] * 16
            with replica.client() as client:
                assert client.info("replication")["role"] == "master"
                if not and_back:
                    return  # the rest waits for Sentinel's own pace, a minute or more on a busy machine
                # The old master comes back, as a replica; and it takes over again without having died.
                master.start()
                await until(lambda: _in_step(master), "the old master is in step")
            with sentinel.client() as watcher:
                await until(lambda: _fails_over_to(master, watcher), "the old master is master again")

            async def writes() -> bool:
                key = name_of(300)
                await tier.delete([key])
                return await store(tier, [key]) == [WriteOutcome.STORED]

            async with asyncio.timeout(PATIENCE_S):
                while not await writes():
                    await asyncio.sleep(0.01)
            assert await load(tier, KEYS) == [ReadOutcome.OK] * 16


def _knows_replica(watcher: Redis) -> bool:
    (master,) = watcher.sentinel_masters().values()
    return bool(master["num-slaves"] == 1)


def _in_step(server: RedisServer) -> bool:
    with contextlib.suppress(RedisError), server.client() as client:
        return bool(client.info("replication").get("master_link_status") == "up")
    return False


def _fails_over_to(server: RedisServer, watcher: Redis) -> bool:
    """Whether a server is master. If not, a failover by hand is under way afterwards, or can't be begun yet.

    One is not enough: Sentinel knows a replica by what it asks every ten seconds and refuses until then, and it gives a
    failover up that takes longer than its failover-timeout, which a busy machine makes happen.
    """
    with server.client() as client:
        if client.info("replication")["role"] == "master":
            return True
    (master,) = watcher.sentinel_masters().values()
    if master["port"] != server.port and "failover_in_progress" not in master["flags"]:
        with contextlib.suppress(RedisError):
            watcher.execute_command("SENTINEL FAILOVER", "kv")
    return False


async def test_sentinels_that_are_not_there() -> None:
    ports = free_ports(2)
    url = f"redis+sentinel://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/kv"
    async with opened(url) as tier:
        assert tier.state is TierState.FAILED
        assert "No master found" in tier.stats()["fault"]["text"]
        assert await store(tier, KEYS) == [WriteOutcome.FAILED] * 16
